"""Which service has which hosts, and where ranks of several hosts meet: pure functions, and tables of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge_rl.engines.devices import Devices, device_type, gpus, standing_for
from forge_rl.engines.host import HostInfo
from forge_rl.errors import ConfigError
from forge_rl.flags.given import giving
from forge_rl.run.placement_flag import PlacementChoice, read_placement
from forge_rl.run.plan.placing import PlacedServices, place
from forge_rl.run.run_config import RunConfig
from forge_rl.run.start import hosts as hosts_module
from forge_rl.run.start.hosts import RunHosts, device_defaults
from forge_rl.runtime.addresses import Address, HostNetwork, interface_towards, meeting_address
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.seats import ReplicaSize, Seat, Seats, ServiceHosts, ranks_by_host
from forge_rl.services import host_actor
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.services.trainer_config import CriticConfig, TrainerConfig
from recipes import ppo

CPU = HostInfo(kind="cpu", gpus=(), gpu_bytes=0, cores=8, memory_bytes=1 << 34, space="machine 0")
GPU = replace(CPU, kind="cuda", gpus=("0", "1", "5", "GPU-7"), gpu_bytes=80 << 30, cores=64)


def hosts(**infos: HostInfo) -> dict[str, HostInfo]:
    """A controller without GPUs, and hosts on machines of their own."""
    named = {THIS_HOST: CPU} | infos
    return {name: replace(info, space=name) for name, info in named.items()}


def placed(infos: dict[str, HostInfo], ranks: int = 1, placement: str = "auto") -> PlacedServices:
    return place(RunConfig(placement=placement, trainer=TrainerConfig(ranks=ranks)), infos)


def test_a_placement_is_a_word_a_table_in_a_line_or_a_file(tmp_path: Path):
    choice = PlacementChoice(devices="separate", hosts={"trainer": ("a", "b"), "reward": ("c",)})
    (tmp_path / "placement.toml").write_text('devices = "separate"\ntrainer = ["a", "b"]\nreward = "c"\n')
    for text in ("separate; trainer=a+b; reward=c", choice.text, str(tmp_path / "placement.toml")):
        assert read_placement(text) == choice
    assert (read_placement("colocated").text, read_placement("").devices) == ("colocated", "auto")
    for text, problem in (
        ("shared", "'shared' is not a placement"),
        ("trianer=a", "'trianer' is not a service"),
        ("trainer=", "trainer has the hosts ''"),
        ("trainer=a+a", "trainer has the hosts 'a\\+a'"),
        (str(tmp_path / "none.toml"), "No such file"),
    ):
        with pytest.raises(ConfigError, match=problem):
            RunConfig(placement=text)


@pytest.mark.parametrize(
    ("infos", "ranks", "trainer", "generator", "reward"),
    [
        (hosts(), 2, [THIS_HOST], [THIS_HOST], [THIS_HOST]),
        (hosts(a=CPU, b=CPU), 1, ["a"], ["b", "a"], [THIS_HOST]),  # engines go first where no ranks are
        (hosts(a=CPU, b=CPU, c=CPU), 4, ["a", "b"], ["c", "a", "b"], [THIS_HOST]),
        (hosts(a=GPU, b=GPU), 4, ["a"], ["b", "a"], [THIS_HOST]),  # as few as hold them
        (hosts(a=GPU, b=GPU, c=CPU), 8, ["a", "b"], ["a", "b"], ["c"]),  # rewards where no GPU waits for them
    ],
)
def test_a_default_uses_all_hosts(
    infos: dict[str, HostInfo], ranks: int, trainer: list[str], generator: list[str], reward: list[str]
):
    placement = placed(infos, ranks)
    hosts_of = {"trainer": trainer, "generator": generator, "reward": reward, "environment": reward}
    assert placement.hosts == {name: tuple(hosts) for name, hosts in hosts_of.items()}


def test_a_choice_wins_and_is_checked():
    infos = hosts(a=GPU, b=GPU, c=CPU)
    placement = placed(infos, 2, "trainer=b+a;environment=a")
    assert (placement.hosts["trainer"], placement.hosts["environment"]) == (("b", "a"), ("a",))
    assert placement.with_weights == (THIS_HOST, "b", "a")
    assert (placement.devices, placement.meet) == (Devices(kind="cuda", gpus=8, gpu_bytes=80 << 30), True)
    assert placement.of("generator", {"a": 1}).gpus == {"a": ("1", "5", "GPU-7"), "b": GPU.gpus}
    assert "host c: reward (8 cores, 16 GiB)" in placement.lines()
    for text, problem in (
        ("trainer=d", "gives trainer the host 'd'"),
        ("trainer=a+b+c", "2 trainer ranks cannot be split evenly"),
    ):
        with pytest.raises(ConfigError, match=problem):
            placed(infos, 2, text)
    with pytest.raises(ConfigError, match="with GPUs, and without: c"):
        _ = placed(infos, 2, "generator=c").devices


def test_hosts_of_one_machine_share_its_cores():
    infos = {name: replace(CPU, cores=9) for name in (THIS_HOST, "a", "b")}
    assert placed(infos, 2).of("trainer").cores == {"a": 4, "b": 4}


def test_devices_of_the_hosts_stand_for_those_of_the_controller():
    with standing_for(Devices(kind="cuda", gpus=16, gpu_bytes=1)):
        assert (device_type(), gpus()) == ("cuda", 16)
    assert device_type() == "cpu"


def test_flags_of_one_kind_of_device_are_checked_once_the_hosts_are_known():
    trainer, generator = TrainerConfig(enable_cpu_offload=True), GeneratorConfig(enforce_eager=True)
    for settings, problem in (
        ({"trainer": trainer}, "in host memory already"),
        ({"critic": CriticConfig(stays_on_device=True)}, "moved nowhere while engines decode"),
        ({"generator": generator}, "--generator.enforce-eager has no effect, as engines would run on CPU"),
    ):
        config = ppo.Config(job="slurm:nodes=1", **settings)  # type: ignore[arg-type]
        config.check_effects()
        with standing_for(Devices(kind="cuda", gpus=16, gpu_bytes=1)):
            replace(config, trainer=replace(config.trainer, seq_len=0)).check_effects()
        with standing_for(Devices(kind="cpu", gpus=0, gpu_bytes=0)), pytest.raises(ConfigError, match=problem):
            config.check_effects()
    odd = ppo.Config(job="slurm:nodes=1", trainer=TrainerConfig(seq_len=1100))
    odd.check_effects()
    with standing_for(Devices(kind="cuda", gpus=16, gpu_bytes=1)), pytest.raises(ConfigError, match="a row of 1100"):
        odd.check_effects()


def test_settings_with_the_controllers_default_get_the_hosts():
    run_config = RunConfig(generator=GeneratorConfig(max_num_seqs=8))
    run_hosts = RunHosts(
        cluster=cluster_without(), placed=placed(hosts()), replacements=cast(Any, None), defaults=device_defaults()
    )
    assert run_hosts.adapted(run_config) is run_config
    with standing_for(Devices(kind="cuda", gpus=16, gpu_bytes=1)):
        adapted = run_hosts.adapted(run_config)
    assert (run_config.trainer.seq_len, run_config.generator.gpu_memory_utilization) == (1024, 0.4)
    assert (adapted.trainer.seq_len, adapted.generator.gpu_memory_utilization) == (0, 0)
    assert adapted.generator.max_num_seqs == 8
    # A default of the controller that the user has named stays.
    with giving(["trainer.seq_len", "generator.max_num_seqs"]):
        named = RunConfig()
    with standing_for(Devices(kind="cuda", gpus=16, gpu_bytes=1)):
        adapted_config = run_hosts.adapted(named)
    assert (adapted_config.trainer.seq_len, adapted_config.generator.max_num_seqs) == (1024, 64)
    assert adapted_config.generator.gpu_memory_utilization == 0
    with standing_for(Devices(kind="cuda", gpus=16, gpu_bytes=1)):
        adapted_critic = run_hosts.adapted(ppo.Config(critic=CriticConfig(epochs=2))).critic
    assert (adapted_critic.seq_len, adapted_critic.epochs) == (0, 2)


def cluster_without(*lost: str) -> Cluster:
    names = [THIS_HOST, *(name for name in "abc" if name not in lost)]
    return cast(Any, SimpleNamespace(lost_hosts=dict.fromkeys(lost, "it is gone"), leaving=set(), hosts=names))


def test_replicas_are_spread_and_move_when_their_host_is_gone():
    cluster = cluster_without()
    seats = Seats(cluster, ServiceHosts(names=("a", "b"), gpus={"a": GPU.gpus, "b": GPU.gpus}), ReplicaSize(gpus=2))
    first = [seats.take(index) for index in range(3)]
    assert first == [Seat(host="a", place=0), Seat(host="b", place=0), Seat(host="a", place=1)]
    assert seats.take(2) == first[2], "a replacement starts where its predecessor was"
    cluster.lost_hosts["a"] = "killed"
    assert seats.take(0) == Seat(host="b", place=1)
    with pytest.raises(ConfigError, match="no host has room for another replica; gone are a"):
        seats.take(2)

    alone = ServiceHosts(names=("a", "b", "c"), gpus={"a": GPU.gpus, "b": GPU.gpus, "c": GPU.gpus})
    assert ranks_by_host(6, alone, cluster_without()) == {"a": 2, "b": 2, "c": 2}
    assert ranks_by_host(6, alone, cluster_without("b")) == {"a": 3, "c": 3}
    assert ranks_by_host(4, alone, cluster_without("a")) == {"b": 2, "c": 2}
    with pytest.raises(ConfigError, match="6 ranks do not fit on the hosts c; gone are a, b"):
        ranks_by_host(6, alone, cluster_without("a", "b"))
    cpu = ServiceHosts(names=("a",))
    assert Seats(cluster_without("a"), cpu).take(0) == Seat(host="b", place=0)
    assert ranks_by_host(2, cpu, cluster_without("a")) == {"b": 1, "c": 1}
    assert ranks_by_host(2, cpu, cluster_without("a", "b", "c")) == {THIS_HOST: 2}


def test_an_engine_of_two_hosts_has_a_place_on_each_and_moves_as_a_whole():
    cluster = cluster_without()
    gpus = {"a": GPU.gpus, "b": GPU.gpus, "c": GPU.gpus[:2]}
    seats = Seats(cluster, ServiceHosts(names=("a", "b", "c"), gpus=gpus), ReplicaSize(hosts=2, gpus=2), replicas=2)
    first = Seat(host="a", place=0, other_seats=(Seat(host="b", place=0),))
    assert seats.take(0) == first
    assert seats.take(1) == Seat(host="c", place=0, other_seats=(Seat(host="a", place=1),))
    assert (seats.take(0), seats.max_per_host) == (first, 2)
    with pytest.raises(ConfigError, match="the hosts have GPUs for 2 replicas, not for 3"):
        seats.scale(3)
    cluster.lost_hosts["c"] = "killed"
    assert seats.take(1).other_seats[0].host != seats.take(1).host
    cluster.lost_hosts["b"] = "killed"
    with pytest.raises(ConfigError, match="fewer than 2 hosts have room for another replica; gone are b, c"):
        seats.take(0)
    uneven = ServiceHosts(names=("a", "b"), gpus={"a": GPU.gpus, "b": GPU.gpus[:1]})
    with pytest.raises(ConfigError, match="the hosts have GPUs for 1 replicas, not for 2"):
        Seats(cluster_without(), uneven, ReplicaSize(hosts=2)).scale(2)


def test_engines_that_do_not_fit_on_their_hosts_are_refused():
    def with_engines(infos: dict[str, HostInfo], placement: str = "auto", **settings: int) -> PlacedServices:
        return place(RunConfig(placement=placement, generator=GeneratorConfig(**settings)), infos)

    run_hosts = with_engines(hosts(a=GPU, b=GPU), tensor_parallel_size=8, hosts_per_replica=2)
    assert run_hosts.engines_on(GeneratorConfig(tensor_parallel_size=8, hosts_per_replica=2)) == {"b": 4, "a": 4}
    for infos, settings, problem in (
        (hosts(a=GPU), {"hosts_per_replica": 2}, "an engine takes 2 hosts, and engines have 1"),
        (hosts(a=GPU, b=GPU), {"tensor_parallel_size": 8}, "8 devices of an engine do not fit on a host"),
        (hosts(a=CPU, b=CPU), {"tensor_parallel_size": 4, "hosts_per_replica": 2}, "would have 2 workers on each"),
    ):
        with pytest.raises(ConfigError, match=problem):
            with_engines(infos, **{"tensor_parallel_size": 2, **settings})
    for settings, problem in (
        ({"tensor_parallel_size": 3}, "3 workers of an engine cannot be split evenly over 2 hosts"),
        ({"tensor_parallel_size": 2, "spares": 1}, "--generator.spares does not work with engines of 2 hosts"),
    ):
        with pytest.raises(ConfigError, match=problem):
            GeneratorConfig(hosts_per_replica=2, **settings)


def network(space: str, *addresses: str) -> HostNetwork:
    """Addresses as INTERFACE:IP/PREFIX."""
    parts = [address.replace("/", ":").split(":") for address in addresses]
    host_addresses = tuple(Address(interface=name, ip=ip, prefix=int(prefix)) for name, ip, prefix in parts)
    return HostNetwork(space=space, addresses=host_addresses)


def test_ranks_meet_at_a_private_address_that_all_hosts_have_a_way_to():
    machine = network("m1", "eth0:8.8.8.8/24", "eth1:192.168.7.1/24", "ib0:10.0.0.1/16")
    two = network("m2", "eth0:8.8.8.9/24", "ib0:10.0.3.2/16")
    assert meeting_address([machine, machine]) == "127.0.0.1", "one machine needs no network"
    assert meeting_address([machine, two]) == "10.0.0.1"
    assert meeting_address([two, network("m3", "eth0:10.9.0.1/16")]) == "10.0.3.2", "by a router"
    public = network("m4", "eth0:8.8.4.4/24")
    with pytest.raises(ConfigError, match=r"only at 8\.8\.4\.4, which is public"):
        meeting_address([public, machine])
    assert meeting_address([public, machine], may_be_public=True) == "8.8.4.4"
    with pytest.raises(ConfigError, match="no address that other hosts can reach"):
        meeting_address([network("m5"), machine])


def test_a_rank_finds_its_own_interface_to_the_meeting_point():
    assert interface_towards("127.0.0.1") == "lo"
    for address in HostNetwork.of_this_host().addresses:
        assert interface_towards(address.ip) == address.interface


@pytest.mark.parametrize(
    ("problem", "appears", "missing", "sees"),
    [
        ("Permission denied", False, [Path("model")], (False, False)),
        ("", False, [], (False, True)),
        ("", True, [Path("model")], (True, False)),
        ("", True, [], (True, True)),
    ],
)
async def test_a_host_that_does_not_see_the_runs_files_is_known(
    problem: str,
    appears: bool,
    missing: list[Path],
    sees: tuple[bool, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(host_actor, "_SEEN_S", 0.2)
    probe = tmp_path / ".probe"

    async def ask_facts(*_: object, **__: object) -> tuple[str, str]:
        return "facts", "clock"

    monkeypatch.setattr(hosts_module, "ask_facts", ask_facts)

    async def call(method: str, *args: Path, deadline_s: float) -> object:
        if method == "answer_probe" and appears:
            args[1].write_text(probe.name)
        return {"info": CPU, "answer_probe": problem, "missing": missing}[method]

    async def watch(*_: object, **__: object) -> None: ...

    asking = hosts_module._ask_one(
        cast(Any, SimpleNamespace(watch=watch)),
        cast(Any, SimpleNamespace(call=call, index=0, host="a")),
        probe,
        Path("model"),
    )
    assert await asking == ((CPU, "facts", "clock"), *sees)
