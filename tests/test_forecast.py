"""Plans for machines that are not at hand: counts worked by hand, layouts that fit, and hostile config.json files."""

from __future__ import annotations

import heapq
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.context import sequence_bytes
from forge_rl.engines.costs import attention_flops, forward_flops, head_weights, layer_weights
from forge_rl.engines.device_types import DEVICE_TYPES, parse_machine
from forge_rl.engines.devices import assumed_gpus, device_type, gpus
from forge_rl.engines.protocol import DecodeSettings, TrainSettings
from forge_rl.engines.titan.plan import plan_training
from forge_rl.errors import ConfigError, ModelError
from forge_rl.flags.command_line import parse
from forge_rl.forecast import probe
from forge_rl.forecast.lengths import longest_of, tail
from forge_rl.forecast.roofline import GPU_EFFICIENCY, Spread, Workload, rollout_times, train_times
from forge_rl.forecast.search import Machines, read_policy, search
from forge_rl.forecast.show import flags, placed, show_forecast
from forge_rl.run.target import on_target
from recipes.grpo import Config

COMMON = {"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN3_8B = COMMON | json.loads(
    """{"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}"""
)
QWEN3_30B = COMMON | json.loads(
    """{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true}"""
)
DEEPSEEK_V3 = COMMON | json.loads(
    """{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256,
    "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": true, "routed_scaling_factor": 2.5}"""
)
GPT_OSS_20B: dict[str, object] = json.loads(
    """{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": true, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 150000, "swiglu_limit": 7.0, "rope_scaling": {"rope_type": "yarn",
    "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
    "original_max_position_embeddings": 4096}}"""
)
EXAMPLES = {
    "qwen3-0.6b-24g": QWEN3_8B
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"tie_word_embeddings": True},
    "qwen3-8b-8xh100": QWEN3_8B,
    "qwen3-30b-a3b-8xh200": QWEN3_30B,
    "gpt-oss-20b-h200": GPT_OSS_20B,
    "gpt-oss-120b-16xh200": GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128},
}
"""The shape of each model in recipes/examples, from its published config.json."""
SMALL = QWEN3_8B | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 4000}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
FILES = sorted((Path(__file__).parent.parent / "recipes" / "examples").glob("*.toml"))


def written(folder: Path, config: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def planned(folder: Path, *words: str) -> Config:
    args = ["--plan", "--model-config", str(folder), *words]
    with on_target(args):
        return parse(Config, "grpo", args)


def on(config: Config) -> Machines:
    count, device = parse_machine(config.target.on)
    return Machines(device=device, per_host=count, hosts=config.target.hosts)


def test_counts_are_the_ones_worked_by_hand(tmp_path: Path) -> None:
    bf16 = DecodeSettings(dtype="bfloat16")
    dense = read_architecture(written(tmp_path, QWEN3_8B))
    layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288
    assert layer_weights(dense) == 36 * layer == 6_945_767_424
    assert head_weights(dense) == 622_329_856
    assert dense.weights == 6_945_767_424 + 2 * 622_329_856
    assert sequence_bytes(dense, bf16, 1) == 2 * 36 * 8 * 128 * 2 == 147_456
    assert attention_flops(dense, 1000) == 36 * 4 * 32 * 128 * 1000
    assert forward_flops(dense, 0, has_head=True) == 2 * (36 * layer + 622_329_856)
    sparse = read_architecture(written(tmp_path, QWEN3_30B))
    active = 48 * (2048 * 128 * (2 * 32 + 2 * 4) + 128 * 2048 + 8 * 3 * 2048 * 768)
    assert layer_weights(sparse) == pytest.approx(active)
    assert active + 2 * head_weights(sparse) == pytest.approx(3.35e9, rel=0.01), "A3B"
    assert layer_weights(sparse, 10_000) == pytest.approx(sparse.weights - 2 * head_weights(sparse), rel=1e-6)
    latent = read_architecture(written(tmp_path, DEEPSEEK_V3))
    assert latent.weights == pytest.approx(671e9, rel=0.001)
    assert layer_weights(latent) + head_weights(latent) == pytest.approx(36.7e9, rel=0.02), "37B active"
    assert sequence_bytes(latent, bf16, 1) == 61 * (512 + 64) * 2


def test_times_are_the_slower_of_arithmetic_and_memory(tmp_path: Path) -> None:
    dense = read_architecture(written(tmp_path, QWEN3_8B))
    device, use = DEVICE_TYPES["H100-80G"], GPU_EFFICIENCY
    alone = Workload(groups=1, group_size=1, prompt=1, answer=100, longest=100)
    settings = DecodeSettings(dtype="bfloat16", max_num_seqs=256)
    slow = rollout_times(dense, settings, alone, device, engines=1, cache_bytes=40e9, use=use)
    read = 2 * (6_945_767_424 + 622_329_856) + 51 * 147_456
    assert slow.parts["memory bandwidth"] == pytest.approx(100 * read / (3350e9 * use.memory), rel=1e-3)
    assert slow.binds == "memory bandwidth"
    many = Workload(groups=64, group_size=8, prompt=1, answer=100, longest=100)
    assert rollout_times(dense, settings, many, device, engines=1, cache_bytes=40e9, use=use).sequences == 256
    few = rollout_times(dense, settings, many, device, engines=1, cache_bytes=101 * 147_456 * 10, use=use)
    assert few.sequences == 10, "the cache holds ten sequences"
    with pytest.raises(ConfigError, match="hold no sequence"):
        rollout_times(dense, settings, many, device, engines=1, cache_bytes=147_456, use=use)
    train = TrainSettings(dtype="bfloat16", seq_len=4096)
    one_rank = train_times(dense, train, many, device, spread=Spread(ranks=1, per_host=8), use=use)
    tokens = 64 + 51_200
    products = 6 * (6_945_767_424 * tokens + 622_329_856 * 51_200)
    attention = 3 * 51_200 * 36 * 4 * 32 * 128 * 51
    seconds = (products / use.training + attention / use.attention) / 989e12
    assert one_rank.parts["arithmetic"] == pytest.approx(seconds / 0.9, rel=1e-3)
    assert one_rank.parts["optimizer"] == pytest.approx(28 * dense.weights / (3350e9 * use.memory))
    near, far = (
        train_times(dense, train, many, device, spread=Spread(ranks=16, per_host=ranks_per_host), use=use)
        for ranks_per_host in (16, 8)
    )
    assert far.parts["links of FSDP beyond arithmetic"] > near.parts["links of FSDP beyond arithmetic"]


def test_an_update_that_was_measured_on_a_gpu_is_predicted(tmp_path: Path) -> None:
    """Two rows of 8,192 tokens of Qwen3-1.7B's shapes took 0.8617 s on an H100, a batch of two long answers."""
    shape = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
    a = read_architecture(written(tmp_path, QWEN3_8B | shape | {"tie_word_embeddings": True}))
    work = Workload(groups=2, group_size=1, prompt=1, answer=8191, longest=8191)
    settings, use = TrainSettings(dtype="bfloat16", seq_len=8192), replace(GPU_EFFICIENCY, filled=1.0)
    times = train_times(a, settings, work, DEVICE_TYPES["H100-80G"], spread=Spread(ranks=1, per_host=8), use=use)
    assert times.parts["arithmetic"] == pytest.approx(0.8617, rel=0.03)


def test_the_tail_of_a_rollout_is_that_of_its_lengths(tmp_path: Path) -> None:
    assert longest_of(500, mean=100, longest=1e9) == pytest.approx(100 * math.log(1000))
    assert longest_of(500, mean=100, longest=300) == 300
    assert longest_of(500, mean=300, longest=300) == 300
    assert list(tail(8, mean=50, longest=50, last=50)) == [(50, 8)], "equal answers end together"
    assert longest_of(1, mean=100, longest=200) == pytest.approx(125.5 * math.log(2), rel=1e-3)
    steps = list(tail(64, mean=100, longest=1e9, last=100 * math.log(128)))
    assert sum(count for count, _ in steps) == pytest.approx(100 * math.log(128))
    assert sum(count * answers for count, answers in steps) == pytest.approx(64 * 100, rel=0.02)
    assert [answers for _, answers in steps] == list(range(64, 0, -1))
    device, settings = DEVICE_TYPES["H100-80G"], DecodeSettings(dtype="bfloat16", max_num_seqs=64)
    dense, use = read_architecture(written(tmp_path, QWEN3_8B)), GPU_EFFICIENCY
    work = Workload(groups=16, group_size=8, prompt=1, answer=100, longest=1000)
    few = rollout_times(dense, settings, work, device, engines=1, cache_bytes=40e9, use=use)
    # 128 answers, 64 at a time: 100 steps until the last has a place, and then 64 have as far to go as new ones.
    busy = use.step_s * (100 + 100.045 * math.log(128)) + use.sequence_s * 128 * 100
    assert few.parts["scheduling and sampling"] == pytest.approx(busy, rel=0.02)
    ahead = rollout_times(dense, settings, replace(work, ahead=1), device, engines=1, cache_bytes=40e9, use=use)
    # Engines that work ahead never have fewer, unless the longest takes more than two phases.
    longest = 100.045 * math.log(256) / 2
    assert ahead.parts["scheduling and sampling"] == pytest.approx(
        use.step_s * longest + use.sequence_s * 128 * 100, rel=0.01
    )
    assert ahead.seconds < few.seconds
    uncut = rollout_times(dense, settings, replace(work, longest=10_000), device, engines=1, cache_bytes=40e9, use=use)
    assert uncut.seconds == pytest.approx(few.seconds, rel=0.01), "the longest that flags allow is not every batch's"


@pytest.mark.parametrize(("answers", "seats", "engines"), [(512, 64, 1), (512, 64, 8), (64, 64, 8), (2048, 16, 1)])
def test_steps_of_a_rollout_are_those_of_a_simulation(tmp_path: Path, answers: int, seats: int, engines: int) -> None:
    """Engines that take their next answer when one ends, with random lengths; `answers` and `seats` are of each."""
    generator, mean, last_steps = np.random.default_rng(0), 100, []
    for _ in range(50):
        ends = [[0.0] * seats for _ in range(engines)]
        for queue in ends:
            for length in generator.exponential(mean, answers):
                heapq.heappush(queue, heapq.heappop(queue) + length)
        last_steps.append(max(max(queue) for queue in ends))
    work = Workload(groups=answers * engines, group_size=1, prompt=1, answer=mean, longest=100 * mean)
    a, use = read_architecture(written(tmp_path, QWEN3_8B)), replace(GPU_EFFICIENCY, sequence_s=0.0)
    settings, device = DecodeSettings(dtype="bfloat16", max_num_seqs=seats), DEVICE_TYPES["H100-80G"]
    times = rollout_times(a, settings, work, device, engines=engines, cache_bytes=40e9, use=use)
    assert times.parts["scheduling and sampling"] / use.step_s == pytest.approx(np.mean(last_steps), rel=0.03)


def test_hot_experts_are_counted_under_expert_parallelism(tmp_path: Path) -> None:
    a = read_architecture(written(tmp_path, QWEN3_30B | {"num_hidden_layers": 3}))
    settings = TrainSettings(dtype="bfloat16", seq_len=4096, expert_parallel_degree=8)

    def hot(**changes: Any) -> int:
        return plan_training(a, replace(settings, **changes), ranks=8, reference=False).hot_experts

    # 7/9 of the mean's rows more, of 8 experts a token: inputs, results, two hidden halves and SwiGLU, bfloat16.
    excess = 4096 * 8 * 7 / 9 * (2 * 2048 + 3 * 768) * 2
    assert hot() == pytest.approx(excess * 4)
    assert hot(activation_checkpointing="full") == pytest.approx(excess * 2)
    inputs = 4096 * 8 * 7 / 9 * 2048 * 2
    assert hot(activation_checkpointing="selective") == pytest.approx(excess * 2 + 2 * inputs)
    assert hot(expert_balance="least_loaded") == 2 * 3 * 2048 * 768 * 2, "one borrowed expert and its gradients"
    assert hot(expert_parallel_degree=1) == 0


def test_a_small_model_is_laid_out_on_sixteen_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = planned(written(tmp_path, SMALL), "--on", "8xH100-80G", "--hosts", "16", "--groups-per-batch", "64")
    assert device_type() == "cpu", "only planning assumes GPUs"
    assert config.trainer.seq_len == 0, "flags have the defaults of CUDA"
    machines = on(config)
    plan = search(config, read_policy(tmp_path, reference=False, values=False), machines)
    trainer, generator = plan.config.trainer, plan.config.generator
    assert (trainer.ranks, generator.replicas * generator.devices) == (128, 128)
    assert plan.shares_devices
    where = {who: place for who, place, _ in placed(plan, machines)}
    assert where["trainer ranks"] == where["engines"] == "host 0, device 0 to host 15, device 7"
    with assumed_gpus(128, machines.device.memory):
        config_of_flags = parse(Config, "grpo", [word for flag in flags(plan) for word in flag.split()])
        assert gpus() == 128
        assert config_of_flags.trainer == trainer, "the flags that are shown make this layout"
        small = replace(plan, config=replace(plan.config, trainer=replace(trainer, optimizer_state="int8")))
        assert set(flags(small)) - set(flags(plan)) == {"--trainer.optimizer-state int8"}
    show_forecast(config)
    output = capsys.readouterr().out
    for text in (
        "16 hosts of 8xH100-80G",
        "keys and values",
        "limited by",
        "assumed: training 0.34",
        "data sheet",
        "and load",
    ):
        assert text in output


def test_a_tensor_parallel_degree_that_the_search_chose_is_compared_with_none(tmp_path: Path) -> None:
    def reasons(shape: dict[str, object], *words: str) -> list[str]:
        words = ("--on", "2xH100-80G", "--groups-per-batch", "1", "--group-size", "4", *words)
        config = planned(written(tmp_path, shape), *words)
        return [*search(config, read_policy(tmp_path, reference=False, values=False), on(config)).reasons]

    long = ("--generator.max-model-len", "4096", "--generator.max-tokens", "4000")
    (line,) = reasons(QWEN3_8B | {"num_hidden_layers": 8}, *long)
    expected = (
        r"--generator.tensor-parallel-size 2: a step takes [\d.]+ s with 1, rollout [\d.]+ s, 4 answers on each engine"
    )
    assert re.fullmatch(expected, line)
    assert reasons(SMALL, "--generator.tensor-parallel-size", "2") == [], "a degree that flags set has no reason"


def test_each_example_for_a_named_machine_is_planned() -> None:
    assert {path.stem for path in FILES} == EXAMPLES.keys()


@pytest.mark.long
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_fits_the_machine_that_it_names(path: Path, tmp_path: Path) -> None:
    first = path.read_text().partition("\n\n")[0]
    machine = re.search(r"Planned, not run: --plan (--on \S+(?: --hosts \d+)?)", first)
    assert machine, first
    shape = tmp_path / "model"
    shape.mkdir()
    config = planned(written(shape, EXAMPLES[path.stem]), "--config", str(path), *machine[1].split())
    layout = search(config, read_policy(shape, reference=False, values=False), on(config))
    assert layout.config.trainer.ranks == on(config).per_host * on(config).hosts, "every device trains"


def test_separate_devices_overlap_where_the_schedule_does(tmp_path: Path) -> None:
    config = planned(written(tmp_path, SMALL), "--on", "4xA100-40G", "--schedule.kind", "asynchronous")
    plan = search(config, read_policy(tmp_path, reference=False, values=False), on(config))
    trainer, generator = plan.config.trainer, plan.config.generator
    assert trainer.ranks + generator.replicas * generator.devices == 4
    assert plan.step_s == max(plan.rollout.seconds, plan.train.seconds) + plan.publish.seconds


def test_what_does_not_fit_is_refused_with_the_nearest_that_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = planned(written(tmp_path, DEEPSEEK_V3), "--on", "8xH100-80G", "--hosts", "2")
    with pytest.raises(ConfigError, match=r"take 156 GiB on each of 8 H100-80G.* does not span hosts"):
        search(config, read_policy(tmp_path, reference=False, values=False), on(config))
    split = ("--generator.tensor-parallel-size", "16", "--generator.hosts-per-replica", "2")
    config = planned(written(tmp_path, DEEPSEEK_V3), "--on", "8xH100-80G", "--hosts", "2", *split)
    with pytest.raises(ConfigError, match="--on cannot predict engines of several hosts"):
        search(config, read_policy(tmp_path, reference=False, values=False), on(config))
    shape = SMALL | {"hidden_size": 8192, "intermediate_size": 65536, "num_attention_heads": 64}
    config = planned(written(tmp_path, shape | {"num_key_value_heads": 8}), "--on", "1xL4-24G")
    with pytest.raises(ConfigError, match=r"a host needs .* GiB .* and has 48"):
        show_forecast(config)
    output = capsys.readouterr().out
    assert "1xL4-24G cannot hold this run: a host needs" in output
    assert "would fit: 8 hosts of 1xL4-24G" in output
    assert "would fit: 1xA100-40G" in output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "a 'mamba' does without"),
        ({"num_hidden_layers": 5000}, "layers 5000"),
        ({"hidden_size": 2**30}, "dim 1073741824"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"rope_scaling": [1]}, "rope_scaling"),
    ],
)
def test_a_config_is_not_trusted(change: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_policy(written(tmp_path, SMALL | change), reference=False, values=False)


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a file"):
        read_policy(tmp_path, reference=False, values=False)
    (tmp_path / "config.json").write_text(" " * (2 << 20))
    with pytest.raises(ModelError, match="has 2097152 bytes"):
        read_policy(tmp_path, reference=False, values=False)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="cannot be read"):
        read_policy(tmp_path, reference=False, values=False)
    for words, message in (
        (["--on", "8xH10"], "not a known machine"),
        (["--on", "99xH100-80G"], "99 devices"),
        (["--on", "local", "--hosts", "2"], "this machine"),
        ([], "belong to a plan for other machines"),
    ):
        with pytest.raises(ConfigError, match=message):
            planned(tmp_path, *words)
    with pytest.raises(ConfigError, match="--on local is of a plan"):
        parse(Config, "grpo", ["--on", "local"])


def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = planned(
        written(tmp_path, SMALL), "--on", "local", "--generator.max-model-len", "256", "--loss", "clipped:kl_coef=0.1"
    )
    show_forecast(config)
    output = capsys.readouterr().out
    for text in ("measured now", "frozen reference", "prompts of 240 tokens, answers"):
        assert text in output


def test_this_machines_gpus_are_planned_as_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DEVICE_TYPES["H100-80G"]
    monkeypatch.setattr(probe, "_known_gpu", lambda: device)
    words = ("--on", "local", "--trainer.ranks", "2", "--generator.max-model-len", "256")
    with assumed_gpus(4, device.memory):
        show_forecast(planned(written(tmp_path, SMALL), *words))
    printed_text = " ".join(capsys.readouterr().out.split())
    for text in ("layout on 4xH100-80G", "devices 0 to 1", f"assumed: training {GPU_EFFICIENCY.training:g}"):
        assert text in printed_text
