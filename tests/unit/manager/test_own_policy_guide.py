import re
from pathlib import Path

from kvoffload.manager.base import ReqContext
from kvoffload.manager.cpu import CPUOffloadingManager

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "own-policy.md"


def test_the_policy_of_the_guide_runs_by_its_path(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    (tmp_path / "my_policies.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    manager = CPUOffloadingManager(2, "my_policies:FIFO")
    context = ReqContext()
    evicted = []
    for key in (b"A", b"B", b"C", b"D"):
        output = manager.prepare_store([key], context)
        manager.complete_store(output.keys_to_store, ticket=output.ticket)
        manager.touch([b"A"], context)
        evicted += output.evicted_keys
    assert evicted == [b"A", b"B"]
