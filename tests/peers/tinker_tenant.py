"""Trains and samples one adapter by the tinker client: python tinker_tenant.py URL MODEL NAME SEED STEPS.

Run by the Python of an environment with tinker; the key is in TINKER_API_KEY. Prints a line per step, and at the end
the path of a checkpoint.
"""

from __future__ import annotations

import sys

import tinker
from tinker import types


def main(url: str, model: str, name: str, seed: int, steps: int) -> None:
    client = tinker.ServiceClient(base_url=url)
    training = client.create_lora_training_client(model, rank=4, seed=seed).result()
    data = []
    for row in range(3):
        ids = [(seed + 7 * row + 3 * place) % 200 + 10 for place in range(12)]
        tokens = types.ModelInput.from_ints(ids[:-1])
        advantages = [0.0] * 4 + [1.0 if row % 2 else -0.5] * 7
        inputs = {"target_tokens": ids[1:], "logprobs": [-8.0] * 11, "advantages": advantages}
        data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
    sampler = None
    for step in range(steps):
        loss = ("importance_sampling", "ppo", "cispo", "dro")[step % 4]
        passed = [training.forward_backward(data, loss) for _ in range(2)]  # their gradients add up
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
        metrics = [future.result().metrics for future in passed]
        updates = stepped.result().metrics["updates"]
        if step % 3 == 0:
            sampler = training.save_weights_and_get_sampling_client()
        assert sampler is not None
        params = types.SamplingParams(max_tokens=4, seed=step)
        sample = sampler.sample(types.ModelInput.from_ints(data[0].model_input.to_ints()), 1, params).result()
        print(
            f"{name} step {step} updates {updates:.0f} sampled {len(sample.sequences[0].tokens)} "
            f"loss {metrics[0]['loss:sum']:.9g} adapters {max(part['adapters:max'] for part in metrics):.0f}",
            flush=True,
        )
    print("state", training.save_state("last").result().path, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
