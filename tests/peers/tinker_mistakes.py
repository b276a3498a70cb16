"""Makes mistakes by the tinker client, goes on, and asks for much at once: python tinker_mistakes.py URL.

Run by the Python of an environment with tinker; the key is in TINKER_API_KEY. Prints what came of it as JSON.
"""

from __future__ import annotations

import json
import sys

import tinker
from tinker import types

WAIT_S = 300


def main(url: str) -> None:
    client = tinker.ServiceClient(base_url=url)
    training = client.create_lora_training_client("base", rank=4, seed=1).result()
    inputs = {"target_tokens": [6, 7, 8], "weights": [1.0] * 3}
    datum = types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=inputs)
    errors = []
    for mistake in (
        lambda: training.optim_step(types.AdamParams(learning_rate=float("nan"))),
        lambda: training.load_state("tinker://nowhere/weights/none"),
        lambda: training.save_state("x" * 600),
        lambda: training.forward_backward([datum], "gspo"),
    ):
        try:
            mistake().result(timeout=WAIT_S)
        except Exception as error:
            errors.append(type(error).__name__)
    # Three requests, of which the server takes one at a time.
    passed = training.forward_backward([datum] * 3000, "cross_entropy").result(timeout=WAIT_S)
    sampler = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([5, 6])
    samples = [sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, seed=seed)) for seed in range(40)]
    sequences = sum(len(sample.result(timeout=WAIT_S).sequences) for sample in samples)
    print(json.dumps({"errors": errors, "outputs": len(passed.loss_fn_outputs), "sequences": sequences}))


if __name__ == "__main__":
    main(sys.argv[1])
