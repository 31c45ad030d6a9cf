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


def test_a_machine_without_limits_has_what_it_has(tmp_path):
    proc = make_proc(tmp_path / "proc", "4:memory:/old\n0::/user.slice\n")
    limit(tmp_path / "cgroup/user.slice", "max")
    assert host_memory(proc, tmp_path / "cgroup") == HostMemory(64 * GIB, 48 * GIB)


def test_a_container_has_what_it_may_use_less_what_it_uses_but_for_file_caches(tmp_path):
    proc = make_proc(tmp_path / "proc", "0::/\n")
    limit(tmp_path / "cgroup", str(8 * GIB), used=5 * GIB, cached=2 * GIB)
    assert host_memory(proc, tmp_path / "cgroup") == HostMemory(8 * GIB, 5 * GIB)


def test_of_a_job_within_a_job_the_tightest_limit_counts(tmp_path):
    proc = make_proc(tmp_path / "proc", "0::/slurm/job_7/step_0\n")
    limit(tmp_path / "cgroup/slurm/job_7", str(16 * GIB), used=12 * GIB)
    limit(tmp_path / "cgroup/slurm/job_7/step_0", str(32 * GIB), used=12 * GIB)
    assert host_memory(proc, tmp_path / "cgroup") == HostMemory(16 * GIB, 4 * GIB)


def test_of_the_machine_here():
    here = host_memory()
    assert 0 < resident_memory() < here.total
    assert 0 < here.available <= here.total
