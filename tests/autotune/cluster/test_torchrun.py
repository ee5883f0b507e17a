from autotune.cluster.torchrun import Meeting, torchrun_command, version_of

MEETING = Meeting(nodes=4, endpoint="10.0.0.1:20012", job="12", address="$address", is_host="$is_host")


def words(**changes) -> tuple[str, ...]:
    options = {"ranks": 2, "torch_version": "2.13.0+cu128", "meeting": MEETING, "shutdown_s": 105}
    return torchrun_command("python", ["-m", "trainer", "--out", "r"], **options | changes)


def test_nodes_meet_by_address_at_the_place_of_this_job():
    said = words()
    for word in (
        "--nnodes=4", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:20012", "--rdzv-id=12",
        "--rdzv-conf=is_host=$is_host,read_timeout=600", "--local-addr=$address", "--max-restarts=0",
        "--shutdown-timeout=105",
    ):  # fmt: skip
        assert word in said
    assert said[:3] == ("python", "-m", "torch.distributed.run")
    assert said[-4:] == ("-m", "trainer", "--out", "r")


def test_nodes_that_are_numbered_meet_at_the_first_one():
    said = words(meeting=Meeting(nodes=4, endpoint="10.0.0.1:20012", job="12", address="$address", node_rank="$rank"))
    for word in (
        "--nnodes=4", "--rdzv-backend=static", "--master-addr=10.0.0.1", "--master-port=20012", "--node-rank=$rank",
        "--rdzv-id=12", "--local-addr=$address",
    ):  # fmt: skip
        assert word in said
    assert not any("endpoint" in word or "is_host" in word for word in said)


def test_one_node_alone_meets_nobody():
    said = words(meeting=None)
    assert "--standalone" in said
    assert not any("rdzv" in word or "local-addr" in word for word in said)


def test_options_that_torch_does_not_have_are_left_out():
    assert not any("shutdown" in word for word in words(torch_version="2.12.1"))
    assert version_of("nonsense") == (0, 0)
