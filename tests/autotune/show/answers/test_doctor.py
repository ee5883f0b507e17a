import json
from datetime import UTC, datetime

from autotune.core.hardware import GpuStatus, MachineFacts, Unavailable
from autotune.show.answers import answer_json
from autotune.show.answers.doctor import doctor_answer
from tests.autotune.core.test_hardware import HOST, NO_SLURM, ONE


def test_a_machine_is_told_with_what_follows_from_its_facts():
    machine = MachineFacts(
        time_utc=datetime(2025, 1, 1, tzinfo=UTC),
        host=HOST,
        gpus=(GpuStatus(facts=ONE, sample=Unavailable(reason="why"), processes=()),),
        gpu_absent=None,
        gpu_unreadable=(),
        slurm=NO_SLURM,
        versions={"numpy": "2"},
    )
    told = json.loads(answer_json(doctor_answer(machine, [], "next")))["machine"]
    assert told["time_utc"] == "2025-01-01T00:00:00+00:00"
    assert told["gpus"][0]["sample"] == {"reason": "why"}
    assert told["host"]["allotted_cpus"] == 8
    assert told["slurm"]["in_job"] is False
