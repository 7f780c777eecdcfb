"""The arms of a rollout, by family: their pairs, their environment, the cache that holds them, and what is claimed of them."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import report, rollout, rollout_worker
from benchmarks.legs import Arm, LegError
from lite.errors import InputError
from lite.model.registry import family
from lite.runtime.rollout.vllm_cache import cache_bytes, mamba_bytes
from lite.vllm_plugin import stock_decode

FAKE = "tests.unit.benchmarks.fake_worker"
SPEC = {"vocab_size": 50, "step_tokens": 64}
SECONDS = {"exact": 4e-4, "stock": 1e-4, "bi_ssu": 2e-4}


def config(name, layers, geometry="real"):
    protocol = family(name)
    return protocol.build_model_config(protocol.proxy_config(geometry, layers))


def arguments(tmp_path, *flags):
    return rollout._arguments(["--out", str(tmp_path / "r.json"), "--input", "64", "--output", "32", "--concurrency", "1", "2", *flags])


def run_rollout(tmp_path, spec, *flags, work=rollout.measure):
    args = arguments(tmp_path, *flags)
    args.against = args.against or ["stock", "bi_ssu"]
    result = rollout.new_result(args)
    with report.Progress(args.out) as progress:
        arms = {
            name: Arm(name, FAKE, SPEC | {"arm": name, "token_seconds": SECONDS[name]} | spec.get(name, {}), progress.log(name))
            for name in ("exact", *args.against)
        }
        work(args, arms, result, progress)
    return json.loads(args.out.read_text())


# Which arms there are.


def test_a_family_with_mamba_layers_has_a_third_arm():
    dense, mixture, hybrid = config("qwen3", 4), config("qwen3_moe", 4), config("nemotron_h", 7)
    assert [rollout.opponents(None, c) for c in (dense, mixture, hybrid)] == [["stock"], ["stock"], ["stock", "bi_ssu"]]
    assert rollout.opponents(["bi_ssu"], hybrid) == ["bi_ssu"] and rollout.opponents(["stock"], hybrid) == ["stock"]


def test_the_third_arm_of_a_model_without_mamba_layers_is_refused():
    with pytest.raises(InputError, match="--against"):
        rollout.opponents(["stock", "bi_ssu"], config("qwen3_moe", 4))


def test_the_plugin_is_on_in_both_arms_of_ours_and_off_in_stock():
    switches = ("VLLM_BATCH_INVARIANT", "MLITE_EXACT")
    found = {name: rollout.arm_environment(name, False) for name in ("exact", *rollout.OTHERS)}
    assert found["exact"] == found["bi_ssu"] and [found["exact"][name] for name in switches] == ["1", "1"]
    assert [found["stock"][name] for name in switches] == [None, None], "what the caller's shell has on is taken away"
    assert [rollout.arm_environment("bi_ssu", profile)["VLLM_ENABLE_V1_MULTIPROCESSING"] for profile in (True, False)] == ["0", None]


def test_the_arms_of_ours_differ_in_nothing_but_the_worker(monkeypatch):
    from lite.runtime.rollout import vllm

    built = []
    monkeypatch.setattr(vllm, "build_llm", lambda folder, **options: built.append(options))
    sizes = {"max_model_len": 96, "step_tokens": 64, "sequences": 2, "cache_bytes": 9}
    spec = {"folder": "x", "attention": "FLASH_ATTN", "hybrid": True, **sizes}
    rollout_worker.exact(spec)
    rollout_worker.bi_ssu(spec)
    exact, bi_ssu = built
    assert bi_ssu == exact | {"worker_cls": "lite.vllm_plugin.stock_decode.worker"} and exact["plugin"] and exact["hybrid"]
    assert callable(stock_decode.worker) and stock_decode.worker.__name__ == "worker"


def test_a_worker_tells_the_plugins_layers_by_their_modules():
    ours = type("ExactRMSNorm", (), {"__module__": "lite.vllm_plugin.layers"})
    stock = type("RMSNorm", (), {"__module__": "vllm.model_executor.layers.layernorm"})
    model = SimpleNamespace(modules=lambda: [stock(), ours(), ours()])
    worker = SimpleNamespace(get_model=lambda: model, model_runner=SimpleNamespace())
    assert rollout_worker._in_worker(worker)["replaced"] == ["ExactRMSNorm"]


# The cache.


def test_the_cache_of_a_dense_model_is_keys_and_values():
    """Qwen3-8B's layers: 8 heads of 128, in bf16: 4,096 bytes a token and layer."""
    assert cache_bytes(config("qwen3", 4), 2, 9216) == int(1.1 * 2 * (9216 + 64) * 4 * 4096)


def test_the_cache_of_a_hybrid_by_hand():
    """Nemotron-3-Nano's layers, MEMEM*E: 3 Mamba, 1 attention of 2 heads of 128 (1,024 bytes a token), the experts keep nothing. A Mamba
    layer: 3 rows of 6,144 before the convolution, 64 heads of 64 x 128 in fp32, 128 rows of 6,144 and of 64 = 3,723,264 bytes, so 3,648
    tokens of attention a page (docs/vllm.md)."""
    hybrid = config("nemotron_h", 7)
    assert mamba_bytes(hybrid.mamba) == 36_864 + 2_097_152 + 1_572_864 + 16_384 == 3_723_264
    page = 3_735_552
    assert page == 3648 * 1024
    request = (9216 + 64) * 1024 + page + 3 * page
    assert cache_bytes(hybrid, 64, 9216) == int(1.1 * 64 * request) + page


def test_the_cache_of_a_whole_hybrid_counts_groups_of_layers():
    """23 Mamba layers beside 6 of attention: 4 groups of 6, one layer of them empty."""
    page, whole = 3_735_552, config("nemotron_h", None)
    assert [whole.mixers.count(kind) for kind in ("mamba", "attention")] == [23, 6]
    assert cache_bytes(whole, 1, 9216) == int(1.1 * (6 * ((9216 + 64) * 1024 + page) + 24 * page)) + 6 * page


@pytest.mark.parametrize("sequences", [1, 3, 64])
@pytest.mark.parametrize("layers", [7, 13, None])
@pytest.mark.parametrize("length", [96, 3648, 9216, 40000])
def test_vllms_blocks_hold_every_request_with_the_pages_of_any_arm(sequences, layers, length):
    """As vLLM 0.26 counts (kv_cache_utils.py, block_pool.py): blocks of one page for each layer of a group, one of them never handed out.
    2,096 tokens: the page of vLLM's own decode, which keeps no rows."""
    hybrid = config("nemotron_h", layers)
    mamba, attention = (hybrid.mixers.count(kind) for kind in ("mamba", "attention"))
    group = min(mamba, attention) if max(mamba, attention) >= 1.5 * min(mamba, attention) else max(mamba, attention)
    for tokens in (3648, 2096):
        blocks = cache_bytes(hybrid, sequences, length) // (group * tokens * 1024)
        groups_of_mamba, groups_of_attention = -(-mamba // group), -(-attention // group)
        needed = sequences * (groups_of_mamba + groups_of_attention * -(-(length + 1) // tokens))
        assert blocks - 1 >= needed


def test_the_engines_are_given_the_same_sizes(tmp_path):
    args = arguments(tmp_path)
    spec = rollout.engine_spec(args, tmp_path, config("nemotron_h", 7))
    assert spec["hybrid"] and spec["cache_bytes"] == cache_bytes(config("nemotron_h", 7), 2, 96) and spec["sequences"] == 2
    assert not rollout.engine_spec(args, tmp_path, config("qwen3_moe", 4))["hybrid"]


# What is measured.


@pytest.mark.slow
def test_rollout_reports_what_was_planted(tmp_path):
    pytest.importorskip("matplotlib")
    found = run_rollout(tmp_path, {})
    assert found["finished"] and found["complete"]
    assert found["options_that_differ"]["async_scheduling"] == {"exact": False, "stock": True, "bi_ssu": False}
    legs = [leg for leg in found["legs"] if leg["concurrency"] == 2]
    for other in ("stock", "bi_ssu"):
        assert [(leg["arm"], leg["pair"]) for leg in legs if leg["against"] == other] == [
            ("exact", 0), (other, 0), (other, 1), ("exact", 1), ("exact", 2), (other, 2),
        ]  # fmt: skip
    rows = {(row["concurrency"], row["against"]): row for row in found["summary"]}
    assert list(rows) == [(1, "stock"), (1, "bi_ssu"), (2, "stock"), (2, "bi_ssu")]
    ratios = {other: rows[2, other]["ratio"]["median"] for other in ("stock", "bi_ssu")}
    assert 0.15 < ratios["stock"] < ratios["bi_ssu"] < 0.85 and len(rows[2, "bi_ssu"]["ratio"]["pairs"]) == 3
    assert "bi_ssu" in rows[1, "bi_ssu"] and "stock" not in rows[1, "bi_ssu"]
    assert rollout._table(found["summary"]).row_count == 4 and (tmp_path / "r.png").stat().st_size > 1000
    assert rollout.main(["--draw", str(tmp_path / "r.json")]) == 0


def leg(pair, arm, against, rate):
    return {"concurrency": 1, "pair": pair, "arm": arm, "against": against, "tokens_per_second": rate, "decode_tokens_per_second": 2 * rate}


def test_each_ratio_is_of_its_own_pairs():
    """The exact legs of the two opponents differ, as on a device that warms up; neither is paired with the other's."""
    legs = [leg(0, "exact", "stock", 1.0), leg(0, "stock", "stock", 4.0), leg(0, "exact", "bi_ssu", 3.0), leg(0, "bi_ssu", "bi_ssu", 6.0)]
    stock, bi_ssu = rollout.summarise(legs, [1], ["stock", "bi_ssu"])
    assert (stock["ratio"]["median"], bi_ssu["ratio"]["median"], bi_ssu["decode_ratio"]["median"]) == (0.25, 0.5, 0.5)
    assert (stock["exact"]["tokens_per_second"], bi_ssu["exact"]["tokens_per_second"]) == (1.0, 3.0)


def test_a_profile_compares_exact_with_each_opponent(tmp_path):
    def window(wall):
        return {"wall_ms": wall, "idle_ms": 0.0, "groups_ms": {"mamba": wall}, "launches": {"mamba": 1}}

    def work(args, arms, result, progress):
        for name, arm in arms.items():
            arm.reply(30)
            arm.ask = lambda name=name, **_: {"prefill": window(1.0), "decode": window(1e4 * SECONDS[name])}
        rollout._profile(args, arms, result, progress)
        for arm in arms.values():
            arm.close()

    found = run_rollout(tmp_path, {}, "--profile", work=work)["profile"]["against"]
    assert {other: found[other]["decode"]["difference_ms"] for other in found} == {"stock": 3.0, "bi_ssu": 2.0}
    assert found["bi_ssu"]["prefill"]["difference_ms"] == 0


# What is claimed.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"stock": {"options": {"max_num_seqs": 1}}}, "max_num_seqs"),
        ({"bi_ssu": {"options": {"kv_cache_memory_bytes": 2}}}, "kv_cache_memory_bytes"),
        ({"bi_ssu": {"options": {"replaced": ["ExactMambaMixer2", "ExactRMSNorm"]}}}, "bi_ssu runs .*ExactMambaMixer2"),
        ({"bi_ssu": {"options": {"replaced": []}}}, "bi_ssu runs .. of the plugin"),
        ({"stock": {"options": {"replaced": ["ExactRMSNorm"]}}}, "stock runs"),
        ({"exact": {"handshake": []}}, "no handshake"),
    ],
)
def test_nothing_is_claimed_of_arms_that_are_not_what_they_are_named_for(tmp_path, spec, says):
    with pytest.raises(LegError, match=f"nothing is claimed: .*{says}"):
        run_rollout(tmp_path, spec)
    found = json.loads((tmp_path / "r.json").read_text())
    assert not found["finished"] and found["legs"] == []


def test_time_that_is_used_up_ends_the_run_with_a_result(tmp_path):
    found = run_rollout(tmp_path, {}, "--minutes", "0")
    assert found["finished"] and not found["complete"] and found["legs"] == []


def test_an_unknown_opponent_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        arguments(tmp_path, "--against", "sglang")
    assert "sglang" in capsys.readouterr().err
