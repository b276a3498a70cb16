"""Sampling by seed and position in vLLM's first model runner: the noise, its independence, and drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from forge_rl.engines.vllm.sampling import Streams

pytestmark = [
    pytest.mark.processes,  # importing vLLM takes as long as starting some
    pytest.mark.skipif(torch.cuda.is_available(), reason="the sampler of CPUs"),
]
_COUNT = 20_000


def streams(seeds: torch.Tensor | int, positions: torch.Tensor | int) -> Streams:
    from forge_rl.engines.vllm.sampling import Streams

    return Streams(
        *torch.broadcast_tensors(*(torch.as_tensor(values, dtype=torch.int64) for values in (seeds, positions)))
    )


def draw(logits: torch.Tensor, places: Streams) -> torch.Tensor:
    from forge_rl.engines.vllm import sampling

    contiguous = type(places)(places.seeds.contiguous(), places.positions.contiguous())
    return sampling.draw(logits.expand(len(contiguous.seeds), -1).contiguous(), contiguous)


def p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's chi-square test that counts were drawn with these probabilities."""
    expected = counts.sum() * probs.double()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(probs) - 1) / 2).double(), statistic / 2))


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    def expected(logits: torch.Tensor, seed: int, position: int) -> int:
        key = mix((mix((seed + 0x9E3779B97F4A7C15) % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64)
        bits = [mix((key + (token + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11 for token in range(len(logits))]
        uniform = (torch.tensor(bits, dtype=torch.float64) + 0.5) * 2.0**-53
        return int((logits.double() - (-uniform.log()).log()).argmax())

    torch.manual_seed(0)
    logits = 2 * torch.randn(5, 1000)
    logits[:, ::3] = -torch.inf
    seeds, positions = [0, 1, 2**63 - 1, -5, 2**32], [0, 7, 1, 131071, 7]
    tokens = draw(logits, streams(torch.tensor(seeds), torch.tensor(positions)))
    assert tokens.tolist() == [expected(*place) for place in zip(logits, seeds, positions, strict=True)]


@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        (3, torch.arange(_COUNT)),
        (torch.arange(_COUNT), 11),
        (torch.arange(_COUNT) << 32, 0),
        (torch.arange(_COUNT), torch.arange(_COUNT)),
    ],
    ids=["positions", "seeds", "high-bits", "both"],
)
def test_tokens_are_distributed_by_the_softmax(
    seeds: torch.Tensor | int, positions: torch.Tensor | int, temperature: float
) -> None:
    torch.manual_seed(1)
    logits = 2 * torch.randn(12) / temperature
    counts = torch.bincount(draw(logits, streams(seeds, positions)), minlength=12)
    assert p_value(counts, logits.double().softmax(-1)) > 1e-3


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [(0, 1), (0, 2), (1, 0), (1, -1), (1, 1), (1 << 32, 0), (1_000_003, 0)],
    ids=str,
)
def test_tokens_of_other_seeds_and_positions_are_independent(seeds: int, positions: int) -> None:
    """Pairs of tokens at places that differ by these, each of four equally likely ones."""
    torch.manual_seed(2)
    first = torch.randint(1 << 40, (_COUNT,)), torch.randint(1, 1 << 17, (_COUNT,))
    tokens, shifted = (draw(torch.zeros(4), streams(first[0] + by * seeds, first[1] + by * positions)) for by in (0, 1))
    assert p_value(torch.bincount(4 * tokens + shifted, minlength=16), torch.full((16,), 1 / 16)) > 1e-3


@pytest.mark.parametrize("greedy", ["none", "some", "all"])
def test_drafts_change_no_token(greedy: str) -> None:
    """Whether drafts are right, wrong from some place on, padded or missing, tokens are those sampled one by one."""
    from forge_rl.engines.vllm.sampling import verify

    torch.manual_seed(3)
    longest, words = 3, 50
    shapes = [(length, wrong) for length in range(longest + 1) for wrong in range(length + 1)]
    count = len(shapes)
    temperature = torch.tensor([float(greedy == "none" or (greedy == "some" and row % 2)) for row in range(count)])
    logits = torch.randn(count, longest + 1, words)
    places = streams(torch.arange(count) + 7, torch.arange(100, 100 + count))
    alone = torch.stack(
        [draw(logits[:, place], streams(places.seeds, places.positions + place)) for place in range(longest + 1)], 1
    )
    alone = torch.where(temperature[:, None] == 0, logits.argmax(-1), alone)
    drafts = [alone[row, :length].tolist() for row, (length, _) in enumerate(shapes)]
    for row, (length, wrong) in enumerate(shapes):
        drafts[row][wrong:] = [-1 if row % 3 else (token + 1) % words for token in drafts[row][wrong:]]
        places.positions[row] += length  # vLLM knows the position of the last drafted token
    lengths = torch.tensor([length for length, _ in shapes])
    metadata: Any = SimpleNamespace(
        all_greedy=greedy == "all",
        all_random=greedy == "none",
        temperature=None if greedy == "all" else temperature,
        generators=places,
    )
    output = verify(
        torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32),
        lengths.tolist(),
        longest,
        lengths.cumsum(0).int(),
        None,
        torch.cat([logits[row, :length] for row, (length, _) in enumerate(shapes)]),
        alone[torch.arange(count), lengths][:, None].int(),
        metadata,
    )
    for row, (_, wrong) in enumerate(shapes):
        assert output[row].tolist() == [*alone[row, : wrong + 1].tolist(), *[-1] * (longest - wrong)]


def test_a_draft_is_accepted_with_its_probability() -> None:
    from forge_rl.engines.vllm.sampling import verify

    torch.manual_seed(4)
    logits = torch.randn(6)
    ends = torch.arange(1, _COUNT + 1, dtype=torch.int32)
    metadata: Any = SimpleNamespace(all_greedy=False, all_random=True, generators=streams(torch.arange(_COUNT), 5))
    for token, chance in enumerate(logits.double().softmax(-1).tolist()):
        drafted = torch.full((_COUNT,), token, dtype=torch.int32)
        bonus = torch.zeros(_COUNT, 1, dtype=torch.int32)
        output = verify(drafted, [1] * _COUNT, 1, ends, None, logits.expand(_COUNT, 6).contiguous(), bonus, metadata)
        accepted = (output[:, 1] >= 0).sum()
        assert p_value(torch.stack([accepted, _COUNT - accepted]), torch.tensor([chance, 1 - chance])) > 1e-3


def test_a_request_without_a_seed_draws_anew_each_time() -> None:
    from forge_rl.engines.vllm.sampling import _streams

    def request(seed: int | None) -> Any:
        return SimpleNamespace(sampling_params=SimpleNamespace(seed=seed))

    runner: Any = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=["a", "b"]),
        requests={"a": request(None), "b": request(2**63 - 1)},
        query_start_loc=SimpleNamespace(gpu=torch.tensor([0, 4, 5, 5])),
        positions=torch.tensor([6, 7, 8, 9, 30]),
    )
    first, second = _streams(runner), _streams(runner)
    assert first.positions.tolist() == [9, 30], "of each request's last token"
    assert first.seeds[0] != second.seeds[0]
    assert first.seeds[1] == second.seeds[1] == 2**63 - 1


@pytest.mark.parametrize("top_k", [None, 3])
def test_vllms_samplers_draw_the_same_with_and_without_drafts(top_k: int | None) -> None:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from forge_rl.engines.vllm.cpu_rejection import run_without_kernels
    from forge_rl.engines.vllm.sampling import sample_by_position

    run_without_kernels()
    sampler = Sampler(logprobs_mode="processed_logprobs")
    rejection_sampler = RejectionSampler(sampler)
    torch.manual_seed(5)
    words, drafts, starts = 5, [[2, 1, 0], [2], []], [0, 4, 6]
    temperatures, none = torch.tensor([0.5, 1.0, 2.0]), torch.zeros(3)
    sampling = SamplingMetadata(
        temperature=temperatures,
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[], [], []],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        spec_token_ids=drafts,
    )
    batch = SimpleNamespace(req_ids=["a", "b", "c"], sampling_metadata=sampling, generators={0: torch.Generator()})

    def sample(logits: torch.Tensor, metadata: SpecDecodeMetadata | None) -> Any:
        sampling.top_k = None if top_k is None else torch.full((3,), top_k)  # vLLM changes it
        sampling.max_num_logprobs = 0 if metadata else None
        return rejection_sampler(metadata, None, logits, sampling) if metadata else sampler(logits, sampling)

    runner: Any = SimpleNamespace(
        input_batch=batch,
        sampler=sampler,
        requests={name: SimpleNamespace(sampling_params=SimpleNamespace()) for name in batch.req_ids},
        query_start_loc=SimpleNamespace(gpu=None),
        positions=None,
        _sample=sample,
    )
    sample_by_position(runner)
    positions = torch.tensor([30, 31, 32, 33, 8, 9, 20])
    lengths = set()
    for seed in range(100):
        for place, name in enumerate(batch.req_ids):
            runner.requests[name].sampling_params.seed = seed + place
        logits = 2 * torch.randn(7, words)
        logits[[0, 1, 2, 4], [2, 1, 0, 2]] += 2  # the drafts are often right
        metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
        metadata.target_logits_indices = torch.tensor([0, 1, 2, 4])
        metadata.bonus_logits_indices = torch.tensor([3, 5, 6])
        runner.query_start_loc.gpu, runner.positions = torch.tensor([0, 4, 6, 7]), positions
        output = runner._sample(logits.clone(), metadata)
        tokens, logprobs = RejectionSampler.parse_output(output.sampled_token_ids, words, (), output.logprobs_tensors)
        assert logprobs is not None
        scores = iter(logprobs.logprobs[:, 0].tolist())
        one_by_one = []
        for place in range(4):
            lines = torch.tensor([start + min(place, len(draft)) for start, draft in zip(starts, drafts, strict=True)])
            runner.query_start_loc.gpu, runner.positions = torch.arange(4), positions[lines]
            one_by_one.append(runner._sample(logits[lines], None).sampled_token_ids[:, 0].tolist())
        for row, ids in enumerate(tokens):
            assert ids == [step[row] for step in one_by_one[: len(ids)]]
            for place, token in enumerate(ids):
                scaled = logits[starts[row] + place] / temperatures[row]
                if top_k is not None:
                    scaled[scaled < scaled.topk(top_k).values[-1]] = -torch.inf
                assert next(scores) == pytest.approx(float(scaled.log_softmax(-1)[token]), abs=1e-5)
        lengths.add(tuple(map(len, tokens)))
    assert len(lengths) == 8
    assert {length for *_, length in lengths} == {1}
    assert not batch.generators, "vLLM would rewind them"
