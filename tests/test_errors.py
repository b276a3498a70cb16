"""Errors: what they print, and that they cross processes whole."""

import copy
import pickle

import pytest

from forge_rl import errors
from forge_rl.errors import DeadlineError, ForgeError, ServiceError
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.link import _pack

PLAIN = [
    errors.ForgeError,
    errors.ConfigError,
    errors.RunStopped,
    errors.InfrastructureError,
    errors.ModelError,
    errors.TaskError,
    errors.UnscoredError,
    errors.ContextError,
    errors.CheckpointError,
    errors.WeightsError,
    errors.AttestationError,
    errors.LossError,
    errors.JudgeError,
    errors.UngradedError,
    errors.SpendingError,
]
SERVICES = [ServiceError, DeadlineError, errors.HangError, errors.ReplicaError, errors.ReplayError, errors.PoisonError]


@pytest.mark.parametrize("kind", PLAIN)
def test_an_error_crosses_processes_with_its_class_and_fields(kind: type[ForgeError]):
    error = pickle.loads(pickle.dumps(kind("3 is too few", hint="set --n to 4")))
    assert type(error) is kind
    assert (error.message, error.hint, error.args) == ("3 is too few", "set --n to 4", ("3 is too few", "set --n to 4"))
    assert str(error) == "3 is too few\n  hint: set --n to 4"


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize("through", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_a_service_error_keeps_where_it_happened(kind: type[ServiceError], through):
    error = kind("it died", service="reward", replica=3, call="score", hint="see the log")
    error.phase = "rollout"
    error.added = "what was added later"
    other = through(error)
    assert type(other) is kind
    assert vars(other) == {
        "message": "it died",
        "hint": "see the log",
        "service": "reward",
        "replica": 3,
        "call": "score",
        "phase": "rollout",
        "added": "what was added later",
    }
    assert str(other) == "reward replica 3, call score, phase rollout: it died\n  hint: see the log"


def test_an_error_without_a_hint_is_one_line():
    assert str(ForgeError("it broke")) == "it broke"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({}, "trainer: it died"),
        ({"replica": 0}, "trainer replica 0: it died"),
        ({"call": "step"}, "trainer, call step: it died"),
    ],
)
def test_a_service_error_says_only_what_is_known(where: dict, message: str):
    assert str(ServiceError("it died", service="trainer", **where)) == message


def test_every_error_can_be_caught_as_one():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) == len(PLAIN) + len(SERVICES)
    assert all(issubclass(kind, ForgeError) for kind in kinds)
    assert issubclass(errors.AttestationError, errors.WeightsError)
    assert issubclass(DeadlineError, ServiceError)
    assert issubclass(errors.ReplicaError, ServiceError)


class Talkative(Exception):
    """A user's exception that quotes all it has."""

    def __str__(self) -> str:
        return "the cause" + "x" * 10_000_000 + "the end"


def test_long_texts_of_users_errors_are_cut_where_they_enter(capsys: pytest.CaptureFixture[str]):
    def raised() -> Exception:
        try:
            raise Talkative
        except Talkative as error:
            return error

    error = ForgeError(f"the reward raised {Talkative()}", hint="fix it")
    loss = errors.LossError("it raised", trace=str(Talkative()))
    faults = Faults()
    faults.listener_failed(raised())
    faults.record("reward", 0, str(Talkative()))
    packed = _pack(raised())
    (short, bare), stderr = pickle.loads(packed), capsys.readouterr().err
    assert bare == b""
    for text in (error.message, str(error), loss.trace, short, *(fault.cause for fault in faults.seen), stderr):
        assert "the cause" in text
        assert "the end" in text
        assert len(text) < 150_000
    assert len(pickle.dumps(error)) < 50_000
    assert error.args == (error.message, "fix it")
