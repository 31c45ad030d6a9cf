"""The memory of a machine, a container and a job."""

from __future__ import annotations

from pathlib import Path

from dpo.system.host import HostMemory, host_memory, resident_memory

GIB = 2**30


def make_proc(root: Path, cgroup: str) -> Path:
    (root / "self").mkdir(parents=True)
    (root / "meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable: {48 * 2**20} kB\n")
    (root / "self/cgroup").write_text(cgroup)
    return root


def limit(group: Path, most: str, *, used: int = 0, cached: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")


def test_the_memory_of_a_machine_a_container_and_a_job_in_a_job(tmp_path):
    proc, group = make_proc(tmp_path / "machine", "4:memory:/old\n0::/user.slice\n"), tmp_path / "cgroup"
    limit(group / "user.slice", "max")
    assert host_memory(proc, group) == HostMemory(64 * GIB, 48 * GIB)

    proc, group = make_proc(tmp_path / "container", "0::/\n"), tmp_path / "container's"
    limit(group, str(8 * GIB), used=5 * GIB, cached=2 * GIB)
    assert host_memory(proc, group) == HostMemory(8 * GIB, 5 * GIB)  # file caches can be taken back

    proc, group = make_proc(tmp_path / "job", "0::/slurm/job_7/step_0\n"), tmp_path / "job's"
    limit(group / "slurm/job_7", str(16 * GIB), used=12 * GIB)
    limit(group / "slurm/job_7/step_0", str(32 * GIB), used=12 * GIB)
    assert host_memory(proc, group) == HostMemory(16 * GIB, 4 * GIB)  # the tightest limit


def test_the_memory_here():
    here = host_memory()
    assert 0 < resident_memory() < here.total
    assert 0 < here.available <= here.total
