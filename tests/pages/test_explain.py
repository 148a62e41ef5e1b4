"""`deltawire explain` in a real browser: its arithmetic, and its figures."""

import base64
import json
import re
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

from deltawire.pages.explain import serve, single_file, url_of
from support import ROOT
from support.browser import LOOKS, fits, serious_problems
from support.pages import in_a_thread
from support.recorded import recorded_steps

FIGURES = ("timeline", "ulp", "bucket", "sync")
RECORDED = json.loads((ROOT / "src/deltawire/pages/static/explain/recorded.json").read_text())
LR3 = RECORDED["recordings"]["rl-lr3e-6"]


@pytest.fixture(scope="module")
def url():
    with in_a_thread(serve()) as server:
        yield url_of(server)


@pytest.fixture
def explain(open_page, url):
    """The page, complete; options as those of `open_page`."""

    @contextmanager
    def opened(address=url, **options):
        with open_page(address, **options) as page:
            page.wait_for_selector("body[data-ready]")
            yield page

    return opened


def info(page, figure):
    return page.evaluate("id => ({...document.getElementById(id).dataset})", figure)


def slide(page, figure, name, index):
    """Move a slider to one of its values."""
    page.evaluate(
        """([figure, name, index]) => {
            const range = document.querySelector(`#${figure} [data-input=${name}] input`);
            range.value = index;
            range.dispatchEvent(new Event("input"));
        }""",
        [figure, name, index],
    )


def press(page, figure, *keys):
    page.focus(f"#{figure}")
    for key in keys:
        page.keyboard.press(key)


# Arithmetic: the same in JavaScript and here


def test_rounding_to_bf16_is_that_of_ml_dtypes(explain):
    rng = np.random.default_rng(7)
    halves = rng.integers(0, 1 << 16, 20_000, dtype=np.uint32) << 16
    patterns = np.concatenate([
        rng.integers(0, 1 << 32, 60_000, dtype=np.uint32),
        halves | 0x8000,  # ties
        halves | 0x7FFF, halves | 0x8001,
        rng.integers(0, 1 << 23, 5_000, dtype=np.uint32),  # subnormals
        np.array([0, 0x80000000, 1, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFF800001,
                  0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32),
    ])  # fmt: skip
    with np.errstate(invalid="ignore"):
        expected = patterns.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    with explain() as page:
        got = page.evaluate(
            """async (text) => {
                const bf16 = await import("explain/bf16");
                const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
                const rounded = Uint16Array.from(new Uint32Array(bytes.buffer), bf16.roundBits);
                return Array.from(new Uint8Array(rounded.buffer), (each) => String.fromCharCode(each)).join("");
            }""",
            base64.b64encode(patterns.tobytes()).decode(),
        )
        strange = page.evaluate(
            """async () => {
                const { fromBf16, toBf16, bitsOfFloat, placeOf, atPlace } = await import("explain/bf16");
                const all = Array.from({ length: 65536 }, (_, i) => i);
                const isReal = (i) => (i & 0x7fff) <= 0x7f80;
                return all.filter((i) => atPlace(placeOf(i)) !== i
                    || (isReal(i) && (toBf16(fromBf16(i)) !== i || bitsOfFloat(fromBf16(i)) !== i * 65536)));
            }"""
        )
    assert np.isnan(expected.view(ml_dtypes.bfloat16)).any()
    assert np.array_equal(np.frombuffer(got.encode("latin-1"), "<u2"), expected)
    assert strange == []


def signs(first, count):
    """The hash of update.js, in 32-bit arithmetic."""
    x = np.arange(first, first + count, dtype=np.uint32)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return np.where((x ^ (x >> 16)) & 1, np.float32(1), np.float32(-1))


def rule(lr, steps):
    """How many weights change in the last of some steps, and since the start, by the rule that the page states."""
    last = since = 0
    for number, name in enumerate(RECORDED["tensors"]):
        start = np.frombuffer(base64.b64decode(LR3["field"]["base"][name]), "<u2").view(ml_dtypes.bfloat16)
        master, before, now = start.astype(np.float32), start, start
        for _ in range(steps):
            master = master + signs(number * len(start), len(start)) * np.float32(lr)
            before, now = now, master.astype(ml_dtypes.bfloat16)
        last += int(np.count_nonzero(before.view(np.uint16) != now.view(np.uint16)))
        since += int(np.count_nonzero(start.view(np.uint16) != now.view(np.uint16)))
    return last, since


def test_the_share_that_snaps_back_is_exact(explain):
    rates = [float(f"{digit}e{power}") for power in range(-8, -3) for digit in range(1, 10)] + [1e-3]
    counts = []
    with explain() as page:
        press(page, "ulp", "Home", "ArrowRight")
        for lr in (3e-6, 1e-8, 1e-6, 5e-5, 1e-3):
            slide(page, "ulp", "lr", rates.index(lr))
            now = info(page, "ulp")
            assert (float(now["lr"]), int(now["step"]), int(now["weights"])) == (lr, 1, 16384)
            assert (int(now["changed"]), int(now["since"])) == rule(lr, 1)
            counts.append(int(now["changed"]))
        slide(page, "ulp", "lr", rates.index(3e-6))
        press(page, "ulp", *["ArrowRight"] * 6)
        now = info(page, "ulp")
        assert (int(now["changed"]), int(now["since"])) == rule(3e-6, 7)
        share = page.inner_text("#ulp [data-share]")
    assert share == f"{100 * (1 - rule(3e-6, 7)[0] / 16384):.3g} %"
    assert len(set(counts)) == len(counts)


def test_the_weight_on_the_line_snaps_back_until_it_does_not(explain):
    with explain() as page:
        press(page, "ulp", "Home", "ArrowRight")
        first = info(page, "ulp")
        assert first["cast"] == first["start"]
        assert "snaps back" in page.inner_text("#ulp [data-facts]")
        press(page, "ulp", "ArrowRight")
        second = info(page, "ulp")
        assert abs(int(second["cast"]) - int(second["start"])) == 1
        page.click("#ulp button:text-is('large')")
        last = info(page, "ulp")
        assert last["cast"] == last["start"] != first["start"]


def test_recorded_cells_are_lit_as_recorded(explain):
    with explain() as page:
        page.locator("#ulp select").nth(1).select_option("rl-lr3e-6")
        press(page, "ulp", "Home", *["ArrowRight"] * 3)
        lit = int(info(page, "ulp")["lit"])
    (step,) = (each for each in recorded_steps("rl-lr3e-6") if each.number == 2 and "embed" in each.tensor)
    assert lit == np.count_nonzero(step.old[:4096] != step.new[:4096]) > 50


def test_classes_and_gaps_of_the_field(explain):
    (step,) = (each for each in recorded_steps("rl-lr1e-6") if each.number == 7 and "embed" in each.tensor)
    old, new = step.old[:4096], step.new[:4096]
    about = RECORDED["recordings"]["rl-lr1e-6"]["classes"][0]
    group = 11
    classes = np.clip(((old >> 7) & 255).astype(int) - about["first"], 0, 15)
    changed = (old != new)[classes == group]
    gaps = np.diff(np.flatnonzero(changed), prepend=-1) - 1
    with explain() as page:
        slide(page, "bucket", "class", 1 + group)
        inside = page.evaluate("({...document.querySelector('[data-inside]').dataset})")
        code = page.locator("#bucket .codes li").first.inner_text().split()
    assert int(inside["members"]) == len(changed)
    assert int(inside["changed"]) == changed.sum() > 0
    assert [int(gap) for gap in inside["gaps"].split()] == gaps.tolist()
    parameter = about["rows"][group]["parameter"]
    remainder = f"{gaps[0] & ((1 << parameter) - 1):0{parameter}b}"
    assert code == [str(gaps[0]), "0" * (gaps[0] >> parameter) + "1" + remainder]


# Figures


def test_times_are_the_measured_ones_where_they_were_measured(explain):
    with explain() as page:
        page.click("#sync button:has-text('As measured')")
        seconds = page.evaluate(
            """Object.fromEntries([...document.querySelectorAll("[data-phase]")].map(
                (each) => [each.dataset.phase, Number(each.dataset.seconds)]))"""
        )
        checks = page.evaluate(
            """async () => (await import("explain/cost")).checks(
                (await (await fetch("recorded.json")).json()).measured)"""
        )
    chain, vllm = RECORDED["measured"]["chain"]["loopback"], RECORDED["measured"]["vllm"]
    for ours, theirs in (("diff", "diff"), ("encode", "encode"), ("commit", "commit"), ("verify and decode", "decode")):
        assert seconds[ours] == pytest.approx(chain["phases"][theirs])
    write = vllm["write"] * (128e6 * 0.0115) / (vllm["weights"] * vllm["density"])
    assert seconds["pause and write"] == pytest.approx(vllm["pause"] - vllm["write"] + write)
    for name, computed, measured in checks:
        assert computed == pytest.approx(measured, rel=0.05), name


def test_the_gpu_times_go_through_the_measured_models(explain):
    with explain() as page:

        def seconds(*names):
            return [float(page.get_attribute(f"#sync [data-phase='{name}']", "data-seconds")) for name in names]

        small, large = RECORDED["measured"]["gpu"]["models"]
        page.click("#sync button:has-text('0.6 B weights')")
        assert seconds("diff") == pytest.approx([small["blocked"]], rel=1e-3)
        # At the density that was measured.
        page.click("#sync button:has-text('8 B weights')")
        expected = [large["blocked"], large["encode"], large["apply"] - large["pause"], large["pause"]]
        assert seconds("diff", "encode", "verify and decode", "pause and write") == pytest.approx(expected, rel=1e-3)


def test_timeline_follows_the_reader(explain):
    with explain() as page:
        before = info(page, "timeline")
        stop = RECORDED["measured"]["gpu"]["reload"]["stop"]
        assert float(before["fullSeconds"]) == pytest.approx(2 * 8.191e9 / (10e9 / 8) + stop)
        assert float(before["pauseSeconds"]) < 0.1
        slide(page, "timeline", "gbits", 1)
        slow = info(page, "timeline")
        assert float(slow["fullSeconds"]) == pytest.approx(2 * 8.191e9 / (0.1e9 / 8) + stop)
        assert slow["pauseSeconds"] == before["pauseSeconds"]
        shares = page.evaluate("[...document.querySelectorAll('#timeline [data-idle]')].map(e => +e.dataset.idle)")
        assert shares[0] > 0.9
        assert shares[1] < 0.01
        page.locator("#timeline [data-input=full] select").select_option("checkpoint")
        assert float(info(page, "timeline")["fullSeconds"]) > 1.99 * float(slow["fullSeconds"])
        assert page.locator("#sync [data-input=gbits] output").inner_text() == "100 Mbit/s"
        page.locator("#timeline [data-input=full] select").select_option("broadcast")
        page.click("#timeline button:has-text('400 Gbit/s')")
        assert float(info(page, "timeline")["fullSeconds"]) < 0.5


def test_timeline_steps_through_its_events(explain):
    with explain() as page:
        press(page, "timeline", "Home")
        assert page.locator("#timeline [data-versions]").all_inner_texts() == ["0", "0"]
        press(page, "timeline", "ArrowRight", "ArrowRight")
        assert page.locator("#timeline [data-versions]").all_inner_texts() == ["1", "1"]
        press(page, "timeline", "End")
        assert page.locator("#timeline [data-versions]").all_inner_texts() == ["3", "3"]
        assert page.locator("#timeline .way[data-way=full] rect.idle").count() == 3


def test_late_replica_takes_the_planned_route(explain):
    cases = [
        (True, False, "anchor 0, 0 → 4, 4 → 5, 5 → 6"),
        (False, False, "anchor 0, 0 → 1, 1 → 2, 2 → 3, 3 → 4, 4 → 5, 5 → 6"),
        (True, True, "anchor 5, 5 → 6"),
    ]
    sizes = {
        f"anchor {hop['version']}" if hop["base"] is None else f"{hop['base']} → {hop['version']}": hop["bytes"]
        for hop in RECORDED["recordings"]["rl-lr1e-6"]["bucket"]["hops"]
    }
    with explain() as page:
        for skips, anchors, expected in cases:
            page.set_checked("#bucket label:has-text('skip deltas') input", skips)
            page.set_checked("#bucket label:has-text('second anchor') input", anchors)
            press(page, "bucket", "Home", *["ArrowRight"] * 6)
            assert info(page, "bucket")["late"] == ""
            press(page, "bucket", "ArrowRight")
            now = info(page, "bucket")
            assert (now["version"], now["late"]) == ("6", expected)
            assert int(now["lateBytes"]) == sum(sizes[name] for name in expected.split(", "))
        slide(page, "bucket", "joins", 6)
        assert info(page, "bucket")["late"] == ""


def test_bucket_has_ten_states(explain):
    with explain() as page:
        press(page, "bucket", "Home")
        seen = []
        for _ in range(12):
            seen.append(info(page, "bucket"))
            press(page, "bucket", "ArrowRight")
        bars = page.evaluate("[...document.querySelectorAll('[data-encoding]')].map(e => +e.dataset.bytes)")
    assert [int(each["version"]) for each in seen[:10]] == list(range(-1, 9))
    assert seen[10] == seen[9]
    totals = [int(each["bucketBytes"]) for each in seen[:10]]
    assert totals == sorted(set(totals))
    assert bars[0] == 6
    assert bars[0] > 4 * bars[1] > 4 * bars[2]


def test_sync_switches_ways_and_replicas(explain):
    with explain() as page:
        assert page.locator("#sync .box.serving").count() == 2
        page.click("#sync button:text-is('8')")
        assert page.locator("#sync .box.serving").count() == 8
        names = []
        for _ in range(9):
            names.append(info(page, "sync")["phase"])
            press(page, "sync", "ArrowRight")
        assert names == [
            "diff", "encode", "upload", "commit", "fetch", "verify and decode", "stage", "pause and write", "resume",
        ]  # fmt: skip
        press(page, "sync", "ArrowLeft")
        assert page.locator("#sync .box.stopped").count() == 8
        delta = float(info(page, "sync")["pause"])
        page.click("#sync button:text-is('Full weights')")
        assert page.get_attribute("#sync button:text-is('Full weights')", "aria-pressed") == "true"
        assert page.locator("#sync .box.stopped").count() == 9, "the trainer waits too"
        assert float(info(page, "sync")["pause"]) > 100 * delta
        press(page, "sync", "End")
        assert page.locator("#sync .box.stopped").count() == 0


def wait_until(page, condition):
    """The page's policy forbids what Playwright waits with."""
    page.evaluate(
        f"new Promise((done) => {{ const look = () => {condition} ? done() : requestAnimationFrame(look); look(); }})"
    )


@pytest.mark.parametrize("figure", FIGURES)
def test_play_pause_and_keys(explain, figure):
    position = f"Number(document.getElementById('{figure}').dataset.position)"
    with explain() as page:
        press(page, figure, "Home")
        assert page.evaluate(position) == 0
        page.keyboard.press("Space")
        assert info(page, figure)["playing"] == "true"
        assert page.inner_text(f"#{figure} .play") == "Pause"
        wait_until(page, f"{position} > 0.02")
        assert page.get_attribute(f"#{figure} [data-status]", "aria-live") == "off"
        page.keyboard.press("Space")
        stopped = page.evaluate(position)
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert info(page, figure)["playing"] == "false"
        assert page.evaluate(position) == stopped
        assert page.get_attribute(f"#{figure} [data-status]", "aria-live") == "polite"
        page.keyboard.press("ArrowRight")
        assert page.evaluate(position) > stopped
        page.keyboard.press("End")
        page.click(f"#{figure} .play")
        wait_until(page, f"{position} > 0 && {position} < 0.9")
        page.click(f"#{figure} [aria-label='Step back']")
        assert info(page, figure)["playing"] == "false"


def test_keys_of_a_control_stay_its_own(explain):
    with explain() as page:
        before = info(page, "ulp")
        page.focus("#ulp [data-input=lr] input")
        page.keyboard.press("ArrowRight")
        after = info(page, "ulp")
    assert (float(after["lr"]), after["position"]) == (4e-6, before["position"])


def test_less_motion_leaves_steps_only(explain):
    with explain(reduced_motion="reduce") as page:
        for figure in FIGURES:
            press(page, figure, "Home", "Space")
            assert info(page, figure)["playing"] == "false"
            assert page.locator(f"#{figure} .play").is_disabled()
            assert page.locator(f"#{figure} .still").is_visible()
            page.keyboard.press("ArrowRight")
            assert float(info(page, figure)["position"]) > 0
        assert page.evaluate("document.getAnimations().length") == 0
    with explain() as page:
        assert not page.locator("#sync .still").is_visible()


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_every_width_and_theme(explain, width, theme):
    with explain(width=width, theme=theme) as page:
        for figure in FIGURES:
            press(page, figure, "Home", "ArrowRight", "ArrowRight")
            label = page.locator(f"#{figure} [role=img]").first.get_attribute("aria-label")
            assert len(label) > 20
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        assert fits(page)
        assert serious_problems(page) == []
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (theme == "light")


def test_print_has_tables_and_no_controls(explain):
    with explain() as page:
        assert not page.locator("#timeline .numbers table").first.is_visible()
        page.emulate_media(media="print")
        for figure in FIGURES:
            assert page.locator(f"#{figure} .numbers table").first.is_visible()
            assert not page.locator(f"#{figure} .toolbar").is_visible()
            assert page.locator(f"#{figure} [role=img]").first.is_visible()


def test_without_scripts_there_is_text(chromium, url):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(url)
    assert "need JavaScript" in page.inner_text("noscript")
    context.close()


# One file


def test_single_file_works_from_a_folder(explain, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(single_file())
    with explain(path.as_uri()) as page:
        assert (
            page.evaluate("performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length")
            == 0
        )
        for figure in FIGURES:
            press(page, figure, "Home")
            first = page.inner_html(f"#{figure} [role=img] >> nth=0") + page.inner_text(f"#{figure} [data-status]")
            press(page, figure, "ArrowRight", "ArrowRight")
            assert (
                page.inner_html(f"#{figure} [role=img] >> nth=0") + page.inner_text(f"#{figure} [data-status]") != first
            )
    assert not re.search(r'(?:src|href)="(?!data:|#)', path.read_text())
