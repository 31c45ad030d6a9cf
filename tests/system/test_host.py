"""The memory of a machine, and of a container on it."""

from dpo.system import host
from dpo.system.host import host_memory


def test_a_container_has_the_memory_that_its_group_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    machine, _ = host_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory()[0] == machine
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100\nactive_file 50\n")
    assert host_memory() == (1000, 550)
