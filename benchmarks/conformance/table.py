"""The comparisons: a loss or estimator of forge_rl, the peer's function and settings, the batches, and why they differ.

To add one, add a line to COMPARISONS: `_trl(method, ours, config)`, `_trl_offline` for a trainer without rollouts,
`_trl_divergence` for a function of logits, or `_verl(method, ours, mode, actor)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from benchmarks.conformance.batches import TOKENS, VOCABULARY
from benchmarks.conformance.ours import (
    Ours,
    discounted_reinforce_pp,
    estimate,
    gae_of,
    gdpo,
    loss_of,
    pass_at_k,
    remax,
    reverse_kl,
)
from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.components import CrossEntropy, Entropy, LossSum
from forge_rl.algorithms.correction import Correction
from forge_rl.algorithms.distillation import Distillation
from forge_rl.algorithms.gae import GaeConfig
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.minibatch_losses import ClipCov, KlCov
from forge_rl.algorithms.policy_losses import Cispo, Dppo, Gmpo, Gspo, Sapo, Vespo
from forge_rl.algorithms.preferences import BradleyTerry, Dpo
from forge_rl.algorithms.value_loss import ValueLoss


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A method of forge_rl and of a peer, on the same batches."""

    method: str
    """Name of the method."""
    peer: Literal["TRL", "verl"]
    ours: Ours
    function: str
    """The peer's function."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its settings, as benchmarks.peers.trl_methods and verl_methods describe them."""
    batches: tuple[str, ...]
    """Kinds of batches."""
    differs: str = ""
    """Why the peer's result differs on purpose; "" if they are equal."""

    @property
    def shown_function(self) -> str:
        """The peer's function, with its mode if it has several."""
        mode = self.settings.get("policy_loss", {}).get("loss_mode")
        return self.function if mode is None else f"{self.function}, {mode}"


_EPISODES = ("plain", "masked", "extreme")
"""Batches with one advantage for each episode."""
_TOKENS = (*_EPISODES, "token_advantages")
_SHARES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
_WHOLE = {"per_device_train_batch_size": 24, "gradient_accumulation_steps": 1}
"""One micro-batch, for what a peer averages over each micro-batch alone."""


def _trl(
    method: str,
    ours: Ours,
    config: Mapping[str, Any],
    *,
    trainer: str = "GRPOTrainer",
    batches: tuple[str, ...] = _TOKENS,
    differs: str = "",
    **settings: Any,
) -> Comparison:
    return Comparison(
        method=method,
        peer="TRL",
        ours=ours,
        function=f"{trainer}._compute_loss",
        settings={"config": {**_SHARES, "loss_type": "dapo", **config}, **settings},
        batches=batches,
        differs=differs,
    )


def _trl_advantages(
    method: str,
    ours: Ours,
    config: Mapping[str, Any],
    *,
    trainer: str = "GRPOTrainer",
    batches: tuple[str, ...] = ("plain", "masked", "unscored"),
    differs: str = "",
) -> Comparison:
    return Comparison(
        method=method,
        peer="TRL",
        ours=ours,
        function=f"{trainer}._generate_and_score_completions",
        settings={"config": {**_SHARES, **config}},
        batches=batches,
        differs=differs,
    )


def _trl_offline(
    method: str,
    ours: Ours,
    config: Mapping[str, Any] | None = None,
    *,
    trainer: str,
    batches: tuple[str, ...] = ("plain", "masked"),
) -> Comparison:
    return Comparison(
        method=method,
        peer="TRL",
        ours=ours,
        function=f"{trainer}.compute_loss",
        settings={"config": {**_SHARES, **(config or {})}},
        batches=batches,
    )


def _trl_divergence(
    method: str, ours: Ours, function: str, *, batches: tuple[str, ...] = ("plain", "masked"), **settings: Any
) -> Comparison:
    return Comparison(method=method, peer="TRL", ours=ours, function=function, settings=settings, batches=batches)


def _verl(
    method: str,
    ours: Ours,
    mode: str,
    actor: Mapping[str, Any] | None = None,
    *,
    function: str = "ppo_loss",
    policy: Mapping[str, Any] | None = None,
    batches: tuple[str, ...] = _TOKENS,
    differs: str = "",
    **settings: Any,
) -> Comparison:
    policy = {"loss_mode": mode} | dict(policy or {}) if mode else {}
    return Comparison(
        method=method,
        peer="verl",
        ours=ours,
        function=function,
        settings={"actor": dict(actor or {}), "policy_loss": policy, **settings},
        batches=batches,
        differs=differs,
    )


def _verl_advantages(
    method: str,
    ours: Ours,
    function: str,
    *,
    batches: tuple[str, ...] = ("plain", "masked"),
    differs: str = "",
    **settings: Any,
) -> Comparison:
    return Comparison(
        method=method,
        peer="verl",
        ours=ours,
        function=f"compute_{function}_advantage" + ("_return" if function == "gae" else ""),
        settings=settings,
        batches=batches,
        differs=differs,
    )


_MEAN = Aggregation(kind="sequence_mean")
_CONSTANT = Aggregation(kind="constant", tokens=TOKENS)
_CLIP = ClippedSurrogate(clip_high=0.2, dual_clip=math.inf)
_HIGHER = ClippedSurrogate(dual_clip=math.inf)
_TIS = ClippedSurrogate(correction=Correction.presets["tis"], dual_clip=math.inf)
_ICEPOP = ClippedSurrogate(correction=Correction.presets["icepop"], dual_clip=math.inf)
_MIS = ClippedSurrogate(correction=Correction.presets["mis"], dual_clip=math.inf)
_SEQUENCE_TIS = ClippedSurrogate(correction=Correction.presets["sequence_tis"], dual_clip=math.inf)
_TOP_ENTROPY = ClippedSurrogate(clip_high=0.2, dual_clip=math.inf, top_entropy_quantile=0.2)
_ENTROPY = loss_of(LossSum({"policy": ClippedSurrogate(), "entropy": Entropy()}, {"entropy": -0.01}))
_NO_DUAL = {"clip_ratio_high": 0.28, "clip_ratio_c": 1e30}
"""verl's settings of _HIGHER."""
_GSPO = {"epsilon": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"}

_TRL_GMPO = {"epsilon": 0.4, "epsilon_high": 0.4}
_GMPO = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}


def _dppo(threshold: float) -> dict[str, float]:
    return {"clip_ratio_low": threshold, "clip_ratio_high": threshold, "clip_ratio_c": 20.0}


def _rejecting(*criteria: str) -> ClippedSurrogate:
    return ClippedSurrogate(correction=Correction(proximal="recompute", reject="+".join(criteria)), dual_clip=math.inf)


def _rejection(*criteria: str) -> dict[str, str]:
    """Return verl's arguments for criteria such as token_k3:0.1."""
    names, bounds = zip(*(criterion.split(":") for criterion in criteria), strict=True)
    return {"rollout_rs": ",".join(names), "rollout_rs_threshold": ",".join(bounds)}


_CRITERIA = {
    "token": ("token_k1:0.8_1.5",),
    "k3 of tokens": ("token_k3:0.03",),
    "product": ("seq_sum_k1:0.4_2.5",),
    "geometric mean": ("seq_mean_k1:0.92_1.08",),
    "mean k2 of sequences": ("seq_mean_k2:0.045",),
    "largest k3 of a sequence": ("seq_max_k3:0.25",),
    "several criteria": ("seq_mean_k1:0.9_1.1", "token_k2:0.1"),
}

TRL_LOSSES = (
    _trl("PPO clip", loss_of(_CLIP), {}),
    _trl("clip-higher (DAPO)", loss_of(_HIGHER), {"epsilon_high": 0.28}),
    _trl("dual clip", loss_of(ClippedSurrogate()), {"epsilon_high": 0.28, "delta": 3.0}),
    _trl(
        "sequence mean",
        loss_of(ClippedSurrogate(aggregation=_MEAN)),
        {"loss_type": "grpo", "epsilon_high": 0.28, "delta": 3.0},
    ),
    _trl(
        "constant divisor (Dr. GRPO)",
        loss_of(ClippedSurrogate(aggregation=_CONSTANT)),
        {"loss_type": "dr_grpo", "epsilon_high": 0.28, "delta": 3.0, "max_completion_length": TOKENS},
    ),
    _trl("token mean", loss_of(_CLIP), {"loss_type": "bnpo", **_WHOLE}, whole=True),
    _trl(
        "token mean of each micro-batch (BNPO)",
        loss_of(_CLIP),
        {"loss_type": "bnpo"},
        differs="TRL divides by the tokens of each micro-batch, so that the split changes the gradient",
    ),
    _trl("CISPO", loss_of(Cispo()), {"loss_type": "cispo", "epsilon_high": 5.0}),
    _trl("SAPO", loss_of(Sapo(aggregation=_MEAN)), {"loss_type": "sapo"}),
    _trl("GSPO", loss_of(Gspo()), {"loss_type": "grpo", **_GSPO}, batches=_EPISODES),
    _trl(
        "GSPO with token advantages",
        loss_of(Gspo()),
        {"loss_type": "grpo", **_GSPO},
        batches=("token_advantages",),
        differs="ours, as verl's, is the paper's GSPO-token; TRL's gives each token the gradient of all advantages",
    ),
    _trl(
        "LUSPO (GSPO, summed over tokens)",
        loss_of(Gspo(aggregation=Aggregation(kind="constant", tokens=1))),
        {"loss_type": "luspo", **_GSPO},
        batches=_EPISODES,
    ),
    _trl("GMPO", loss_of(Gmpo()), _TRL_GMPO, trainer="GMPOTrainer", batches=("plain",)),
    _trl(
        "GMPO with episodes of no trained token",
        loss_of(Gmpo()),
        _TRL_GMPO,
        trainer="GMPOTrainer",
        batches=("masked", "extreme"),
        differs="TRL adds the advantage of an episode without a trained token to the loss, but not to the gradient",
    ),
    _trl(
        "KL penalty k3 with its ratio",
        loss_of(ClippedSurrogate(clip_high=0.2, dual_clip=math.inf, kl_coef=0.1, kl_kind="k3")),
        {"beta": 0.1, "use_bias_correction_kl": True},
        batches=("plain", "masked", "token_advantages"),
    ),
    _trl(
        "KL penalty k3",
        loss_of(ClippedSurrogate(clip_high=0.2, dual_clip=math.inf, kl_coef=0.1, kl_kind="k3")),
        {"beta": 0.1, "use_bias_correction_kl": False},
        batches=("plain", "masked", "token_advantages"),
        differs="without the ratio, its gradient is another divergence's (arXiv 2506.09477)",
    ),
    _trl(
        "decoupled, truncated (TIS)",
        loss_of(_TIS),
        {
            "epsilon_high": 0.28,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 2.0,
        },
        attributes={"use_vllm": True},
        old="proximal",
    ),
    _trl(
        "decoupled, masked (IcePop)",
        loss_of(_ICEPOP),
        {
            "epsilon_high": 0.28,
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 0.5,
            "vllm_importance_sampling_clip_max": 5.0,
        },
        attributes={"use_vllm": True},
        old="proximal",
    ),
    _trl(
        "decoupled, sequences masked (MIS)",
        loss_of(_MIS),
        {
            "epsilon_high": 0.28,
            "vllm_importance_sampling_mode": "sequence_mask",
            "vllm_importance_sampling_clip_max": 3.0,
        },
        attributes={"use_vllm": True},
        old="proximal",
    ),
    _trl(
        "decoupled, sequences truncated",
        loss_of(_SEQUENCE_TIS),
        {
            "epsilon_high": 0.28,
            "vllm_importance_sampling_mode": "sequence_truncate",
            "vllm_importance_sampling_clip_max": 2.0,
        },
        attributes={"use_vllm": True},
        old="proximal",
    ),
    _trl("VESPO", loss_of(Vespo()), {"loss_type": "vespo"}),
    _trl(
        "top 20% of tokens by entropy",
        loss_of(_TOP_ENTROPY),
        {"top_entropy_quantile": 0.2, "per_device_train_batch_size": 12, "gradient_accumulation_steps": 1},
    ),
    _trl(
        "top 20% of tokens by entropy, in micro-batches",
        loss_of(_TOP_ENTROPY),
        {"top_entropy_quantile": 0.2},
        differs="TRL takes the quantile of each micro-batch, so that the split changes which tokens are trained",
    ),
    _trl(
        "off-policy mask of sequences",
        loss_of(ClippedSurrogate(clip_high=0.2, dual_clip=math.inf, off_policy_bound=0.05)),
        {"off_policy_mask_threshold": 0.05},
        batches=_EPISODES,
    ),
    _trl("entropy bonus", _ENTROPY, {"epsilon_high": 0.28, "delta": 3.0, "entropy_coef": 0.01, **_WHOLE}, whole=True),
    _trl(
        "entropy bonus in micro-batches",
        _ENTROPY,
        {"epsilon_high": 0.28, "delta": 3.0, "entropy_coef": 0.01},
        differs="TRL averages entropies over each micro-batch, so that the split changes the gradient",
    ),
    _trl(
        "log ratios beyond 20",
        loss_of(_CLIP),
        {},
        batches=("far",),
        differs="log ratios are clamped to +-20, as in verl; TRL's have no bound, so that one token decides the update",
    ),
)

TRL_OFFLINE = (
    _trl_offline("supervised (SFT)", loss_of(CrossEntropy()), trainer="SFTTrainer"),
    _trl_offline("DPO", loss_of(Dpo(), group_size=2), {"beta": 0.1}, trainer="DPOTrainer"),
    _trl_offline(
        "IPO",
        loss_of(Dpo(kind="ipo", beta=0.3), group_size=2),
        {"beta": 0.3, "loss_type": ["ipo"]},
        trainer="DPOTrainer",
    ),
    _trl_offline("Bradley-Terry", loss_of(BradleyTerry(), group_size=2), trainer="RewardTrainer"),
    _trl_offline(
        "Bradley-Terry, centred",
        loss_of(BradleyTerry(center=0.01), group_size=2),
        {"center_rewards_coefficient": 0.01},
        trainer="RewardTrainer",
    ),
)

TRL_DIVERGENCES = (
    *(
        _trl_divergence(
            f"distillation, {name} (GKD)",
            loss_of(Distillation(k=VOCABULARY, beta=beta)),
            "GKDTrainer.generalized_jsd_loss",
            beta=beta,
        )
        for name, beta in (("forward KL", 0.0), ("reverse KL", 1.0), ("Jensen-Shannon", 0.3))
    ),
    *(
        _trl_divergence(
            f"self-distillation over the top k and a tail, beta {beta:g} (SDPO)",
            loss_of(Distillation(k=3, beta=beta, ratio_max=2.0), support="student"),
            "sdpo.compute_topk_self_distillation_loss",
            distillation_topk=3,
            distillation_alpha=beta,
            distillation_add_tail=True,
            clip=2.0,
        )
        for beta in (0.5, 1.0)
    ),
    _trl_divergence(
        "distillation by advantages (reverse KL of sampled tokens)",
        reverse_kl(),
        "sdpo.compute_sampled_token_self_distillation_loss",
        distillation_alpha=1.0,
    ),
)

VERL_LOSSES = (
    _verl("PPO clip", loss_of(_CLIP), "vanilla", {"clip_ratio_c": 1e30}, batches=(*_TOKENS, "far")),
    _verl("clip-higher (DAPO)", loss_of(_HIGHER), "vanilla", _NO_DUAL, batches=(*_TOKENS, "far")),
    _verl("dual clip", loss_of(ClippedSurrogate()), "vanilla", {"clip_ratio_high": 0.28}, batches=(*_TOKENS, "far")),
    _verl(
        "sequence mean",
        loss_of(ClippedSurrogate(aggregation=_MEAN)),
        "vanilla",
        {"clip_ratio_high": 0.28, "loss_agg_mode": "seq-mean-token-mean"},
    ),
    _verl(
        "constant divisor (Dr. GRPO)",
        loss_of(ClippedSurrogate(aggregation=_CONSTANT)),
        "vanilla",
        {"clip_ratio_high": 0.28, "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": TOKENS},
    ),
    _verl("CISPO", loss_of(Cispo()), "cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
    _verl(
        "CISPO with a lower bound",
        loss_of(Cispo()),
        "cispo",
        {"clip_ratio_high": 4.0},
        differs="verl's default also bounds the weight from below, by 0.8; the paper has no lower bound",
    ),
    _verl("DPPO-TV", loss_of(Dppo()), "dppo_tv", _dppo(0.15)),
    _verl("DPPO-KL", loss_of(Dppo(divergence="kl", threshold=0.05)), "dppo_kl", _dppo(0.05)),
    _verl(
        "CISPO",
        loss_of(Cispo(ratio_max=2.0)),
        "bypass_mode",
        policy={"rollout_correction": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0}},
    ),
    _verl("SAPO", loss_of(Sapo(aggregation=_MEAN)), "sapo"),
    _verl(
        "GSPO",
        loss_of(Gspo()),
        "gspo",
        {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
    ),
    _verl("GMPO", loss_of(Gmpo()), "geo_mean", _GMPO, batches=_EPISODES, shares=(1, 1)),
    _verl(
        "GMPO in micro-batches",
        loss_of(Gmpo()),
        "geo_mean",
        _GMPO,
        batches=_EPISODES,
        differs="verl takes the mean of each micro-batch, so that their number scales the gradient",
    ),
    _verl("REINFORCE (CISPO on-policy)", loss_of(Cispo()), "gpg", batches=("on_policy",)),
    _verl("decoupled, truncated (TIS)", loss_of(_TIS), "vanilla", _NO_DUAL, rollout_is={"rollout_is_threshold": 2.0}),
    _verl(
        "decoupled, masked (IcePop)",
        loss_of(_ICEPOP),
        "vanilla",
        _NO_DUAL,
        rollout_is={"rollout_is_threshold": "0.5_5.0"},
    ),
    _verl(
        "decoupled, sequences masked (MIS)",
        loss_of(_MIS),
        "vanilla",
        _NO_DUAL,
        rollout_is={"rollout_is": "sequence", "rollout_is_threshold": "1e-30_3.0"},
    ),
    _verl(
        "decoupled, sequences truncated",
        loss_of(_SEQUENCE_TIS),
        "vanilla",
        _NO_DUAL,
        rollout_is={"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    ),
    *(
        _verl(
            f"decoupled, rejection by {name}",
            loss_of(_rejecting(*criteria)),
            "vanilla",
            _NO_DUAL,
            rollout_rs=_rejection(*criteria),
        )
        for name, criteria in _CRITERIA.items()
    ),
    _verl(
        "decoupled, rejection and truncation of sequences",
        loss_of(
            ClippedSurrogate(
                correction=replace(Correction.presets["sequence_masked_tis"], reject="seq_sum_k1:0.3_3.0"),
                dual_clip=math.inf,
            )
        ),
        "vanilla",
        _NO_DUAL,
        rollout_is={"rollout_is": "sequence", "rollout_is_threshold": 2.0},
        rollout_rs=_rejection("seq_sum_k1:0.3_3.0"),
    ),
    _verl(
        "decoupled, rejection without a constant divisor",
        loss_of(_rejecting("token_k2:0.05")),
        "vanilla",
        _NO_DUAL,
        rollout_rs=_rejection("token_k2:0.05"),
        kept=True,
        differs="verl's workers divide by the tokens that are kept, so that rejecting some raises the others' weight",
    ),
    _verl(
        "Clip-Cov",
        loss_of(ClipCov(cov_ratio=1.0, cov_low=0.5, cov_high=2.0)),
        "clip_cov",
        policy={"clip_cov_ratio": 1.0, "clip_cov_lb": 0.5, "clip_cov_ub": 2.0},
        shares=(1, 1),
    ),
    _verl(
        "KL-Cov",
        loss_of(KlCov(cov_ratio=0.01)),
        "kl_cov",
        policy={"kl_cov_ratio": 0.01, "ppo_kl_coef": 1.0},
        shares=(1, 1),
    ),
    _verl(
        "KL-Cov in micro-batches",
        loss_of(KlCov(cov_ratio=0.05)),
        "kl_cov",
        policy={"kl_cov_ratio": 0.05, "ppo_kl_coef": 1.0},
        differs="verl chooses tokens in each micro-batch, so that the split changes which ones are penalised",
    ),
    _verl(
        "KL-Cov of most tokens",
        loss_of(KlCov(cov_ratio=0.9)),
        "kl_cov",
        policy={"kl_cov_ratio": 0.9, "ppo_kl_coef": 1.0},
        shares=(1, 1),
        differs="verl also penalises tokens with a negative covariance, or an advantage of 0",
    ),
    _verl("value loss", loss_of(ValueLoss(clip=1e9)), "", function="value_loss", critic={"cliprange_value": 1e9}),
    _verl("value loss, clipped", loss_of(ValueLoss()), "", function="value_loss", critic={"cliprange_value": 0.5}),
    _verl(
        "KL penalty k2",
        loss_of(ClippedSurrogate(kl_coef=0.1)),
        "vanilla",
        {"clip_ratio_high": 0.28, "use_kl_loss": True, "kl_loss_type": "k2", "kl_loss_coef": 0.1},
    ),
    _verl(
        "KL penalty k3",
        loss_of(ClippedSurrogate(kl_coef=0.1, kl_kind="k3")),
        "vanilla",
        {"clip_ratio_high": 0.28, "use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.1},
        batches=("plain", "masked"),
        differs="without the ratio, its gradient is another divergence's (arXiv 2506.09477)",
    ),
    _verl("entropy bonus", _ENTROPY, "vanilla", {"clip_ratio_high": 0.28, "entropy_coeff": 0.01}),
    _verl("supervised (SFT)", loss_of(CrossEntropy()), "", function="sft_loss"),
)

TRL_ADVANTAGES = (
    _trl_advantages("GRPO advantages", estimate("grpo"), {}),
    _trl_advantages("Dr. GRPO advantages", estimate("dr_grpo"), {"scale_rewards": "none"}),
    _trl_advantages("batch std (Lite PPO)", estimate("batch_std"), {"scale_rewards": "batch"}),
    _trl_advantages("REINFORCE with the batch as baseline", estimate("reinforce"), {"num_generations": 24, **_WHOLE}),
    _trl_advantages("RLOO", estimate("rloo"), {}, trainer="RLOOTrainer"),
    _trl_advantages(
        "GDPO",
        gdpo((1.0, 0.5)),
        {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
        batches=("plain", "masked", "missing_parts", "unscored"),
    ),
)

VERL_ADVANTAGES = (
    _verl_advantages("GRPO advantages", estimate("grpo"), "grpo_outcome", epsilon=1e-4),
    _verl_advantages(
        "GRPO advantages, default epsilon",
        estimate("grpo"),
        "grpo_outcome",
        differs="verl adds 1e-6 to the standard deviation, we 1e-4 as TRL",
    ),
    _verl_advantages("GRPO advantages", estimate("grpo"), "grpo_vectorized_outcome", epsilon=1e-4),
    _verl_advantages("Dr. GRPO advantages", estimate("dr_grpo"), "grpo_outcome", norm_adv_by_std_in_grpo=False),
    _verl_advantages("RLOO", estimate("rloo"), "rloo_outcome"),
    _verl_advantages("RLOO", estimate("rloo"), "rloo_vectorized_outcome"),
    _verl_advantages("OPO", estimate("opo"), "opo_outcome"),
    _verl_advantages("REINFORCE++", estimate("reinforce_pp"), "reinforce_plus_plus_outcome"),
    _verl_advantages(
        "REINFORCE++ with a group baseline", estimate("reinforce_pp_baseline"), "reinforce_plus_plus_baseline_outcome"
    ),
    _verl_advantages(
        "REINFORCE++ with discount and penalties",
        discounted_reinforce_pp(0.9),
        "reinforce_plus_plus_outcome",
        config={"gamma": 0.9},
        penalties=True,
    ),
    _verl_advantages(
        "GAE",
        gae_of(GaeConfig(gamma=0.9, lambda_policy=0.8, lambda_critic=0.8)),
        "gae",
        gamma=0.9,
        lam=0.8,
        penalties=True,
    ),
    _verl_advantages("ReMax", remax(), "remax_outcome"),
    _verl_advantages("pass@k", pass_at_k(), "grpo_passk_outcome", config={"norm_adv_by_std_in_grpo": False}),
    _verl_advantages(
        "pass@k, scaled",
        pass_at_k(),
        "grpo_passk_outcome",
        differs="verl divides by the std of rewards, which arXiv 2503.19595 does not",
    ),
    _verl_advantages(
        "GDPO",
        gdpo((1.0, 0.5)),
        "gdpo_outcome",
        epsilon=1e-4,
        config={"gdpo_reward_keys": ["0", "1"], "gdpo_reward_weights": [1.0, 0.5]},
        differs="verl whitens over tokens, so that long episodes count more; ours, as TRL's, over episodes",
    ),
)

COMPARISONS = (
    *TRL_LOSSES,
    *TRL_OFFLINE,
    *TRL_DIVERGENCES,
    *VERL_LOSSES,
    *TRL_ADVANTAGES,
    *VERL_ADVANTAGES,
)
