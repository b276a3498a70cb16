"""The effect that each flag promises: its metric, and the advisory if it stays at 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from forge_rl.flags.texts import parse

Settings = Mapping[str, object]
"""A run's settings by flag, such as {"trainer.ranks": 1}."""
Values = Mapping[str, float]
"""Metrics of a step."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a flag promises, and how a step's metrics show it."""

    flag: str
    is_asked_for: Callable[[Settings], bool]
    counted_with: str
    """Start of a metric's name without which a step says nothing about the effect."""
    amount: Callable[[Values, Settings], float]
    """The effect in a step, in any unit; 0 if there was none."""
    steps: int = 5
    """Warn after this many consecutive steps without an effect."""
    cause: str
    """Why there was none, and what to change."""

    def text(self, steps: int) -> str:
        """Return the advisory after so many steps without an effect."""
        return f"{self.flag} had no effect in {steps} steps: {self.cause}"


def _of(*metrics: str) -> Callable[[Values, Settings], float]:
    return lambda values, settings: sum(values.get(metric, 0.0) for metric in metrics)


def _differs(flag: str, *defaults: object) -> Callable[[Settings], bool]:
    return lambda settings: settings.get(flag, defaults[0]) not in defaults


def _above(flag: str, bound: float) -> Callable[[Settings], bool]:
    def is_above(settings: Settings) -> bool:
        value = settings.get(flag)
        return isinstance(value, int | float) and value > bound

    return is_above


def _lent_experts(values: Values, settings: Settings) -> float:
    name = "experts/rank_max_over_mean"
    # Load of the busiest rank over the mean without lending (plain), minus the same with it.
    return values.get(f"{name}/plain", 0.0) - values.get(name, 0.0)


def _shared_tokens(values: Values, settings: Settings) -> float:
    return values.get("tokens/train", 0.0) - values.get("tokens/packed", 0.0)


def _busy_guests(values: Values, settings: Settings) -> float:
    urls, guests = settings.get("generator.urls"), settings.get("generator.guests")
    # Replicas are numbered from the engines at given addresses; guests come next.
    first = len(urls) if isinstance(urls, list | tuple) else 0
    indices = range(first, first + guests) if isinstance(guests, int) else range(0)
    shares = {name.removeprefix("busy/generator/"): share for name, share in values.items()}
    return sum(share for index, share in shares.items() if index.isdecimal() and int(index) in indices)


def _compacts(settings: Settings) -> bool:
    text = str(settings.get("env", ""))
    if not text.startswith("tools"):
        return False
    parsed = parse(text, "--env", bundled=("tools",), takes_argument=True, takes_weight=False)
    return parsed.name == "tools" and "compact_above_chars" in parsed.raw_params


EFFECTS: dict[str, Effect] = {
    "drafts": Effect(
        flag="--generator.speculation",
        is_asked_for=_differs("generator.speculation", "off"),
        counted_with="rollout/drafted",
        amount=_of("rollout/drafted"),
        cause="engines draft nothing, as more requests than its max_running run at all times, or as their texts do not "
        "recur; raise it in --generator.speculation, or set that to off",
    ),
    "lent_experts": Effect(
        flag="--trainer.expert-balance",
        is_asked_for=lambda settings: settings.get("trainer.expert_balance") == "least_loaded",
        counted_with="experts/rank_max_over_mean",
        amount=_lent_experts,
        cause="no rank lent an expert, as their loads are even; plain saves the exchange",
    ),
    "replayed_experts": Effect(
        flag="--trainer.router-replay",
        is_asked_for=_differs("trainer.router_replay", False),
        counted_with="experts/",
        amount=_of("experts/replayed"),
        cause="engines returned no experts for the trained tokens; leave it out if agents or teachers wrote them",
    ),
    "shared_prefixes": Effect(
        flag="--group-size",
        is_asked_for=_above("group_size", 1),
        counted_with="tokens/packed",
        amount=_shared_tokens,
        cause="no prompt was trained once for its group, as no two of its sequences begin alike; look at the prompts "
        "in forge-rl show",
    ),
    "cached_tools": Effect(
        # No flag turns this on, so it counts whenever a step has its metric.
        flag="the cache of pure tools",
        is_asked_for=lambda settings: True,
        counted_with="tools/cache_hits",
        amount=_of("tools/cache_hits"),
        steps=10,
        cause="no call was made twice with the same arguments; see the calls in forge-rl show",
    ),
    "dynamic_sampling": Effect(
        flag="--schedule.dynamic-sampling",
        is_asked_for=_differs("schedule.dynamic_sampling", False),
        counted_with="outcomes/",
        amount=_of("groups/replaced_uniform", "groups/replaced_weak"),
        steps=20,
        cause="no group had equal rewards, so none was replaced; without --schedule.dynamic-sampling the run is the "
        "same",
    ),
    "curriculum": Effect(
        flag="--curriculum.pools",
        is_asked_for=_differs("curriculum.pools", "off"),
        counted_with="curriculum/",
        amount=_of("curriculum/passed_over"),
        steps=20,
        cause="no task was passed over for one of another pool: tasks have pools once they come again, in a file's "
        "second epoch, and all may be of one pool; see data/SOURCE/epoch and curriculum/ in the metrics",
    ),
    "adapted_mixture": Effect(
        flag="--mixture.adapt",
        is_asked_for=_differs("mixture.adapt", "off"),
        counted_with="data/mixture_shift",
        amount=_of("data/mixture_shift"),
        cause="shares equal the given weights, as sources succeed equally often or the bounds leave no room; "
        "widen --mixture.least and --mixture.most, or set it to off",
    ),
    "over_sampling": Effect(
        flag="--schedule.over-sampling",
        is_asked_for=_above("schedule.over_sampling", 1),
        counted_with="outcomes/",
        amount=_of("groups/overtaken"),
        cause="no batch had stragglers to go ahead of; leave it out, so that engines work ahead by the whole lag",
    ),
    "spares": Effect(
        flag="--generator.spares",
        is_asked_for=_above("generator.spares", 0),
        counted_with="generator/spares",
        amount=_of("generator/spares"),
        steps=20,
        cause="none stands by to replace an engine, as they do not start; see logs/ and faults in events.jsonl",
    ),
    "guests": Effect(
        flag="--generator.guests",
        is_asked_for=_above("generator.guests", 0),
        counted_with="busy/generator/",
        amount=_busy_guests,
        cause="they decoded nothing, as the trainer does not wait longer for a batch than the change of its devices "
        "takes; leave it out, or raise --groups-per-batch",
    ),
    "compactions": Effect(
        flag="--env tools:compact_above_chars",
        is_asked_for=_compacts,
        counted_with="episodes/segments",
        amount=lambda values, settings: values.get("episodes/segments", 1.0) - 1,
        cause="no conversation has so many characters before the context is full, which has about four a token; lower "
        "it, or raise --generator.max-model-len",
    ),
    "recomputed_prefixes": Effect(
        flag="--trainer.prefix-states recomputed",
        is_asked_for=_differs("trainer.prefix_states", "shared"),
        counted_with="states/recomputed_tokens",
        amount=_of("states/recomputed_tokens"),
        cause="no state of a prefix was computed again, as no two sequences of a row begin alike; leave it out",
    ),
    "transferred_caches": Effect(
        flag="--generator.kv-transfer-config",
        is_asked_for=_differs("generator.kv_transfer_config", ""),
        counted_with="generator/prefix_hits",
        amount=_of("generator/transferred_tokens"),
        steps=20,
        cause="its connector brought no keys and values back: they were still in the engines' own caches, or new "
        "weights made them stale before a prompt came again; leave it out",
    ),
    "offloaded_activations": Effect(
        flag="--trainer.enable-activation-offload",
        is_asked_for=_differs("trainer.enable_activation_offload", False),
        counted_with="grad_norm",
        amount=_of("activations/offloaded_bytes"),
        cause="no layer was recomputed, so none had its input in host memory meanwhile; set "
        "--trainer.activation-checkpointing full, or leave it out",
    ),
    "warm_sessions": Effect(
        flag="keeping sandbox sessions warm for rewards that run code",
        is_asked_for=lambda settings: True,
        counted_with="sandbox/",
        amount=_of("sandbox/warm"),
        cause="sessions are asked for with different limits each time, or faster than they start; let the reward ask "
        "for the same limits, or raise --reward.replicas",
    ),
    "quantized_weights": Effect(
        flag="--generator.quantization",
        is_asked_for=_differs("generator.quantization", "none"),
        counted_with="generator/quantized_bytes",
        amount=_of("generator/quantized_bytes"),
        cause="engines hold no weights in 8 bits, as vLLM rounds no layer of this model; set it to none",
    ),
    "published_adapters": Effect(
        flag="--lora.publish adapters",
        is_asked_for=lambda settings: (
            bool(settings.get("lora.rank"))
            and settings.get("lora.publish", "adapters") == "adapters"
            and not settings.get("weights.mirror")
        ),
        counted_with="weights/written_share",
        amount=lambda values, settings: 1 - values.get("weights/written_share", 1.0),
        cause="every version was written whole, as a host of the weight store is lost again and again, or few weights "
        "are not adapted; see the run's events",
    ),
    "quantized_base": Effect(
        flag="--lora.base-format",
        is_asked_for=_differs("lora.base_format", "full"),
        counted_with="lora/base_share",
        amount=lambda values, settings: 1 - values.get("lora/base_share", 1.0),
        cause="the model's matrices are so narrow that scales take what codes save; leave it out",
    ),
    "served_adapters": Effect(
        flag="--generator.adapters served",
        is_asked_for=_differs("generator.adapters", "merged"),
        counted_with="generator/served_versions",
        amount=_of("generator/served_versions"),
        cause="engines merged every version, as it was written without adapters; see --lora.publish",
    ),
    "mirrored_changes": Effect(
        flag="--weights.mirror",
        is_asked_for=_differs("weights.mirror", ""),
        counted_with="weights/mirrored_share",
        amount=lambda values, settings: 1 - values.get("weights/mirrored_share", 1.0),
        steps=10,
        cause="versions were written whole or as large, as float32 changes in nearly every element; set "
        "--generator.dtype bfloat16, or raise --weights.mirror-full-every",
    ),
}
"""Effects by the kind of their advisory; docs/running/metrics.md has a table of them."""


def effects_of(values: Values, settings: Settings) -> Iterator[tuple[str, Effect, bool]]:
    """Yield the effects that a run's settings ask for and a step's metrics cover, and whether the step shows each."""
    for kind, effect in EFFECTS.items():
        if effect.is_asked_for(settings) and any(name.startswith(effect.counted_with) for name in values):
            yield kind, effect, effect.amount(values, settings) > 0
