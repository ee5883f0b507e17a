from dataclasses import replace
from datetime import UTC, datetime

from autotune.doctor.sections import doctor_text
from autotune.machine import values
from autotune.machine.decide import Unsuitable
from testbed.fakes import FakeHost
from trainer.formats import gpus

GPU = values.GpuStatus(
    facts=gpus.GpuFacts(
        uuid="GPU-a",
        index=0,
        name="Big Card",
        total_bytes=80 * 2**30,
        mig_enabled=False,
        power_cap_w=350.0,
        compute_mode="default",
        driver="550.1",
        compute_capability=(9, 0),
    ),
    sample=gpus.GpuSample(
        time_s=1.0,
        utilisation=0.25,
        used_bytes=2**30,
        power_w=120.4,
        sm_clock_mhz=1980,
        throttle_reasons=(),
        temperature_c=40,
    ),
    processes=(gpus.GpuProcess(pid=42, used_bytes=None),),
)
HOST = replace(
    FakeHost().facts([]),
    disks=(
        values.DiskFacts(
            path="/d", filesystem_type="lustre", free_bytes=2**40, is_network=True
        ),
        values.DiskFacts(
            path="/u", filesystem_type=None, free_bytes=None, is_network=False
        ),
    ),
    nics=(
        values.NicFacts(
            name="eth0", speed_bits_per_s=25 * 10**9, is_up=True, is_loopback=False
        ),
        values.NicFacts(
            name="eth1", speed_bits_per_s=None, is_up=False, is_loopback=False
        ),
        values.NicFacts(name="lo", speed_bits_per_s=None, is_up=True, is_loopback=True),
    ),
)
MACHINE = values.MachineFacts(
    time_utc=datetime.fromtimestamp(1000, UTC),
    host=HOST,
    gpus=(GPU,),
    gpu_absent=None,
    gpu_unreadable=("GPU 1: lost",),
    slurm=values.SlurmFacts(
        job_id="7",
        end_time_s=4600.0,
        nodes=2,
        tasks=None,
        gpus_per_node=2,
        commands=("srun",),
    ),
    versions={"torch": "2.10"},
)


def test_sections_show_all_facts():
    lines = [" ".join(line.split()) for line in doctor_text(MACHINE, ()).splitlines()]
    assert {
        "0 Big Card 80 GiB 1 GiB 25.0 % 120 / 350 W 1980 MHz 40 °C nothing",
        "0 GPU-a 9.0 default off 550.1 42 (n/a)",
        "unreadable: GPU 1: lost",
        "/d lustre network 1 TiB",
        "/u n/a n/a n/a",
        "eth0 up 25 Gbit/s",
        "eth1 down n/a",
        "inside a job yes, 7",
        "time left 1 h 00 min",
        "tasks n/a",
        "torch 2.10",
        "optuna not installed",
        "none found",
    } <= set(lines)


def test_unreadable_gpu_shows_reasons():
    status = replace(
        GPU,
        sample=gpus.Unavailable(reason="lost"),
        processes=gpus.Unavailable(reason="hidden"),
    )
    text = doctor_text(replace(MACHINE, gpus=(status,)), ())
    assert "n/a (lost)" in text
    assert "n/a (hidden)" in text
    assert " 0 W" not in text


def test_missing_gpu_shows_its_reason():
    assert "none: no driver" in doctor_text(
        replace(MACHINE, gpus=(), gpu_absent="no driver"), ()
    )


def test_findings_have_next_steps():
    text = doctor_text(
        MACHINE, (Unsuitable(severity="error", claim="It burns.", next_step="Leave."),)
    )
    assert text.endswith("  error: It burns.\n    Leave.")


def test_hostile_names_cannot_steer_the_terminal():
    host = replace(HOST, cpu_model="\x1b[2Jmodel\nfault: fake")
    text = doctor_text(
        replace(MACHINE, host=host),
        (Unsuitable(severity="info", claim="\x07", next_step="\r"),),
    )
    assert not any(ord(character) < 32 for character in text.replace("\n", ""))
    assert "\\x1b[2Jmodel fault: fake" in text
