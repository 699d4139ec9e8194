"""What a user can get wrong on the command line: exit code 2, and a message with key, value, limit and remedy.

Each case is a line, and the words that its message must hold: the key as written, the value, what is right.
"""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.cli.main import main

ROOT = Path(__file__).parents[3]
FILES = {
    "bad.jsonl": '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\noops\n',
    "empty.jsonl": "",
    "late.jsonl": "".join(
        f'{{"timestamp": {time}, "input_length": 512, "output_length": 1, "hash_ids": [1]}}\n' for time in (5, 4)
    ),
    "good.toml": 'cpu_bytes_to_use = "1GiB"\ngpu_block_size = 16\nworld_size = 3\n',
    "typo.toml": 'cpu_bytes_to_use = "1GiB"\ngpu_block_size = 16\nworld_siz = 3\n',
    "syntax.toml": "cpu_bytes_to_use = \n",
    "list.json": "[1]",
    "layers.json": '{"num_hidden_layers": 0}',
    "dtype.json": '{"torch_dtype": "q4"}',
    "heads.json": '{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "num_key_value_heads": "x"}',
    "hidden.json": '{"num_hidden_layers": 2, "num_attention_heads": 64, "hidden_size": 4}',
}
SIZES = "plan --set gpu_block_size=16 --set cpu_bytes_to_use"
WHOLE, BYTES, SECONDS = (
    "must be a whole number of at least",
    "'512MiB' or '10GB'",
    "positive number of seconds, such as 2",
)
ENDPOINT = "must look like tcp://host:port, ipc://path or inproc://name"
MISTAKES = [
    ("nonsense", "COMMAND", "'nonsense'", "choose from", "see `kvoffload --help`"),
    ("bench", "COMMAND is missing", "choose from host, cuda", "see `kvoffload bench --help`"),
    ("run --requsts 5", "--requsts", "did you mean --requests?", "see `kvoffload run --help`"),
    ("run --requests", "--requests", "expected one argument", "see `kvoffload run --help`"),
    ("run nofile", "trace nofile", "No such file or directory", "give the path of a JSON lines file"),
    ("run .", "trace .", "Is a directory", "give the path"),
    ("run bad.jsonl", "bad.jsonl:2", "not JSON", "correct it, or go on after such lines (--skip-bad-lines)"),
    ("run late.jsonl", "late.jsonl:2", "timestamp 4", "before the line above, 5", "requests must be in order"),
    ("run empty.jsonl", "empty.jsonl", "no requests", "at least one line"),
    ("run --policy x", "--policy", "'x'", "known are adaptive, arc, lru", "'module.path:ClassName' for your own"),
    ("run --policy nomod:Own", "--policy", "'nomod:Own'", "No module named", "or put its folder on PYTHONPATH"),
    ("run --policy json:Own", "--policy", "'json:Own'", "no class 'Own'", "name a subclass of CachePolicy"),
    ("run --policy json:JSONDecoder", "--policy", "'json:JSONDecoder'", "must be a subclass of CachePolicy"),
    ("run --store-threshold -1", "--store-threshold", "'-1'", f"{WHOLE} 0"),
    ("run --cpu-bytes 64XB", "--cpu-bytes", "'64XB'", BYTES),
    ("run --cpu-bytes 1", "--cpu-bytes", "got 1 bytes", "one offloaded block of 65536 bytes", "--block-bytes 65536"),
    ("run --cpu-bytes 1GiB --capacity 5%", "--capacity", "not allowed with argument --cpu-bytes"),
    ("run --capacity 0%", "--capacity", "'0%'", "a percentage such as 5%"),
    ("run --capacity 0.0001%", "--capacity", "got 0 bytes", "one offloaded block of 65536 bytes"),
    ("run --block-bytes 7", "--block-bytes", "got 7", "a multiple of 8", "such as 8 or 16"),
    ("run --workers 3 --block-bytes 1000", "--block-bytes", "got 1000", "multiple of 24", "such as 984 or 1008"),
    ("run --partial-blocks x", "--partial-blocks", "'x'", "choose from", "keep"),
    ("run --feed abc", "--feed", "'abc'", ENDPOINT),
    ("run --feed tcp://h:70000", "--feed", "'tcp://h:70000'", "0 to 65535", "use tcp://host:port"),
    ("run --feed tcp://127.0.0.1:65535", "--feed", "65535 leaves no port above", "give --feed-replay, or a lower port"),
    ("run --feed-replay tcp://x:1", "--feed-replay", "tcp://x:1", "needs --feed ENDPOINT"),
    ("run --for dynamo", "--for dynamo", "needs --feed ENDPOINT"),
    ("run --feed tcp://a:1 --feed-replay tcp://a:1", "--feed and --feed-replay", "tcp://a:1", "of their own"),
    ("run --feed inproc://a", "--feed", "'inproc://a'", "tcp://host:port or ipc://path"),
    ("run --feed tcp://192.0.2.1:9 --requests 1", "tcp://192.0.2.1:9", "cannot be bound", "an address of this host"),
    ("run --http 1", "--http", "'1'", "must be HOST:PORT, such as 127.0.0.1:9464"),
    ("run --http 192.0.2.1:9 --requests 1", "--http", "192.0.2.1:9", "give an address of this machine and a free port"),
    ("run --metrics-dump no/x --requests 1", "--metrics-dump", "no/x", "No such file", "give a writable file"),
    ("run --speed 0", "--speed", "'0'", "must be 'max' or a positive number"),
    ("run --seed x", "--seed", "'x'", "must be a whole number, such as 7"),
    ("run --concurrency 0", "--concurrency", "'0'", f"{WHOLE} 1"),
    ("run --requests 9999999999999", "--requests", "'9999999999999'", "at most 1000000000000"),
    ("run --forever --dry", "--forever cannot go with --dry", "leave --dry out"),
    ("simulate --policy zzz", "--policy", "'zzz'", "known are adaptive, arc, lru, belady"),
    ("simulate --hint x", "--hint", "'x'", "such as finished:0.8:0.02"),
    ("simulate --hint finished:2:0", "--hint", "'finished:2:0'", "between 0 and 1 (or 0% and 100%)"),
    ("simulate --warmup 2", "--warmup", "'2'", "at least 0 and below 1, such as 0.5"),
    ("simulate --capacity 5%,x", "--capacity", "'x'", "a percentage such as 5%"),
    ("plan", "cpu_bytes_to_use is missing", '"8GiB"', "gpu_block_size is missing"),
    ("plan good.toml", "got none of them", "--model config.json", "--layers", "--group 32:8:128"),
    ("plan good.toml --layers 1 --group 1:1:1", "got --group and --layers", "in one way"),
    ("plan --set a", "--set", "'a'", "must be KEY=VALUE, such as world_size=4"),
    ("plan --set nokey=1 --group 1:1:1", "nokey is no known key", "known keys: block_size"),
    ("plan --set gpu_block_siz=16", "gpu_block_siz is no known key", "did you mean gpu_block_size?"),
    ("plan typo.toml --group 1:1:1", "typo.toml", "world_siz is no known key", "did you mean world_size?"),
    ("plan syntax.toml --group 1:1:1", "syntax.toml", "line 1", "correct it"),
    ("plan nofile.toml", "nofile.toml", "No such file or directory", "give the path of a .toml or .json file"),
    ("plan list.json --group 1:1:1", "list.json", "got [1]", "must hold a table of keys and values"),
    ("plan setup.cfg --layers 3", "setup.cfg", "must end in .toml or .json"),
    ("plan good.toml --layers 3", "--layers 3", "needs --kv-heads and --head-dim, or --latent-dim"),
    (
        "plan good.toml --layers 3 --latent-dim 5 --kv-heads 1",
        "--latent-dim 5", "leave --kv-heads and --head-dim out",
    ),
    ("plan good.toml --group 80:8:128", "8 KV heads", "world_size 3", "set world_size to a divisor or a multiple"),
    ("plan good.toml --model nofile", "--model nofile", "No such file", "give the model's config.json"),
    ("plan good.toml --model list.json", "--model list.json", "a JSON object", "give the model's config.json"),
    ("plan good.toml --model layers.json", "num_hidden_layers", "got 0", "positive whole number", "give --group"),
    ("plan good.toml --model heads.json", "num_key_value_heads", "got 'x'", "positive whole number", "give --group"),
    ("plan good.toml --model hidden.json", "hidden_size 4", "below num_attention_heads 64", "give --group"),
    ("plan good.toml --model dtype.json", "torch_dtype", "'q4'", "give --dtype, one of float32"),
    (f"{SIZES}=64XB --group 80:8:128", "cpu_bytes_to_use", "'64XB'", BYTES),
    (f"{SIZES}=1KiB --group 80:8:128", "cpu_bytes_to_use", "got 1024", "at least one offloaded block of 5242880 bytes"),
    (f"{SIZES}=1GiB --group 80:8", "--group", "'80:8'", "must be LAYERS:KV_HEADS:HEAD_DIM", "such as 32:8:128"),
    (f"{SIZES}=1GiB --set gpu_block_size=16,32 --group 1:1:1", "gpu_block_size [16, 32]", "give one --group for each"),
    ("doctor nofile.toml", "nofile.toml", "No such file or directory", "give the path of a .toml or .json file"),
    ("schema bad.jsonl", "ROOT bad.jsonl", "Not a directory", "give a folder that may be written"),
    ("feed watch foo", "ENDPOINT", "'foo'", ENDPOINT),
    ("feed watch tcp://127.0.0.1", "ENDPOINT", "'tcp://127.0.0.1'", "use tcp://host:port"),
    ("feed watch --seconds nan", "--seconds", "'nan'", SECONDS),
    ("feed snippet", "--for", "required", "see `kvoffload feed snippet --help`"),
    ("feed snippet --for x", "--for", "'x'", "choose from", "llm-d"),
    ("feed snippet --for dynamo --timeout -1", "--timeout", "'-1'", SECONDS),
    ("feed register --indexer x", "--indexer", "'x'", "must be a URL, such as http://127.0.0.1:8090"),
    ("feed verify --samples 0", "--samples", "'0'", f"{WHOLE} 1"),
    ("feed verify --wait x", "--wait", "'x'", SECONDS),
    ("bench host --bytes 1KiB", "--bytes", "got 1024", "at least 2097152, the bytes of the largest block"),
    ("bench manager --parts calls,x", "--parts", "'x'", "some of calls,pins,longest,memory,replay"),
    ("bench manager --vllm-path no", "--vllm-path no", "no unpacked vLLM wheel", "manager.py is missing"),
    ("bench feed --blocks 0", "--blocks", "'0'", f"{WHOLE} 1"),
    ("bench ranks --region 1", "--region", "got 1", "at least 65536 bytes, one block"),
    ("bench chaos --ops 0", "--ops", "'0'", f"{WHOLE} 1"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("line", "told"), [(line, told) for line, *told in MISTAKES], ids=[m[0] for m in MISTAKES])
@pytest.mark.usefixtures("folder")
def test_a_mistake_is_told_with_key_value_limit_and_remedy(line, told, capsys):
    try:
        code = main(line.split())
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert [words for words in told if words not in captured.err] == [], captured.err


def test_a_publisher_that_does_not_answer_is_told_with_what_to_try(capsys):
    line = "feed snippet --for dynamo --replay ipc:///nowhere/at-all --timeout 0.05"
    assert main(line.split()) == 1
    told = capsys.readouterr().err
    assert "no answer from ipc:///nowhere/at-all within 0.05 s: give the replay_endpoint of a publisher" in told


def test_a_package_that_is_not_installed_is_named_with_its_remedy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert main(["bench", "chaos", "--ops", "1", "--uvloop"]) == 1
    assert "'uvloop' is not installed: pip install 'kvoffload[uvloop]'" in capsys.readouterr().err
    assert logging.getLogger("kvoffload.service").level == logging.NOTSET, "the log is silent during the chaos only"


@pytest.mark.parametrize(
    "line",
    ["plan --help", "simulate --requests 20", "run --requests 20 --dry", "doctor", "bench chaos --ops 20 --json"],
)
def test_a_reader_that_goes_away_gets_no_traceback(line):
    code = "import sys; from kvoffload.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen(
        [sys.executable, "-c", code, *line.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        process.stdout.close()
        told = process.stderr.read()
    assert "Traceback" not in told
    assert "Exception ignored" not in told
