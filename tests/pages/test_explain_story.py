"""`deltawire explain` in a real browser: a story that plays, and that is for everybody; and as one file."""

import re

import pytest

from deltawire.pages.explain import single_file
from support.browser import LOOKS, axe_findings, fits
from support.explain import SCENES, info, position_of, press, slide, unfold, wait_until


def test_each_scene_plays_by_itself_once(explain):
    with explain() as page:
        for scene, before in zip(SCENES, (None, *SCENES), strict=False):
            page.locator(f"#{scene} [data-{'bits' if scene == 'weight' else 'stage'}]").scroll_into_view_if_needed()
            wait_until(page, f"{position_of(scene)} > 0.01")
            assert info(page, scene)["playing"] == "true"
            if before:
                assert info(page, before)["playing"] == "false", "one at a time"
        assert not page.locator("#bucket .invite").is_visible()
        press(page, "bucket", "End")
        assert page.locator("#bucket .invite").is_visible()
        page.evaluate("scrollTo(0, 0)")
        page.evaluate("new Promise((done) => setTimeout(done, 300))")
        assert [info(page, scene)["playing"] for scene in SCENES] == ["false"] * 4, "once"


def test_who_has_begun_is_left_alone(explain):
    with explain() as page:
        press(page, "tokens", "End")
        page.locator("#tokens [data-stage]").scroll_into_view_if_needed()
        page.evaluate("new Promise((done) => setTimeout(done, 300))")
        assert (info(page, "tokens")["playing"], info(page, "tokens")["position"]) == ("false", "1.0000")


@pytest.mark.parametrize("scene", SCENES)
def test_play_pause_and_keys(explain, scene):
    position = position_of(scene)
    with explain() as page:
        press(page, scene, "Home")
        assert page.evaluate(position) == 0
        page.keyboard.press("Space")
        assert info(page, scene)["playing"] == "true"
        assert page.inner_text(f"#{scene} .play") == "Pause"
        wait_until(page, f"{position} > 0.02")
        assert page.get_attribute(f"#{scene} [data-status]", "aria-live") == "off"
        page.keyboard.press("Space")
        stopped = page.evaluate(position)
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert info(page, scene)["playing"] == "false"
        assert page.evaluate(position) == stopped
        assert page.get_attribute(f"#{scene} [data-status]", "aria-live") == "polite"
        page.keyboard.press("ArrowRight")
        assert page.evaluate(position) > stopped
        page.keyboard.press("End")
        assert page.inner_text(f"#{scene} .play") == "Replay"
        page.click(f"#{scene} .play")
        wait_until(page, f"{position} > 0 && {position} < 0.9")
        page.click(f"#{scene} [aria-label='Step back']")
        assert info(page, scene)["playing"] == "false"


def test_keys_of_a_control_stay_its_own(explain):
    with explain() as page:
        unfold(page)
        press(page, "weight", "Home")
        page.focus("#weight [data-input=lr] input")
        page.keyboard.press("ArrowRight")
        assert info(page, "weight")["position"] == "0.0000"
        assert page.locator("#weight [data-input=lr] output").inner_text() == "2e-6"


def test_less_motion_goes_from_stop_to_stop(explain):
    with explain(reduced_motion="reduce") as page:
        for scene in SCENES:
            page.locator(f"#{scene}").scroll_into_view_if_needed()
            assert info(page, scene)["playing"] == "false"
        assert page.evaluate("document.getAnimations().length") == 0
        press(page, "bucket", "Home", "Space")
        assert info(page, "bucket")["playing"] == "true"
        page.evaluate(
            """new Promise((done) => {
                globalThis.seen = [];
                const look = () => {
                    const { position, playing } = document.getElementById("bucket").dataset;
                    if (seen.at(-1) !== position) seen.push(position);
                    if (seen.length > 3 || playing === "false") done(); else setTimeout(look, 20);
                };
                look();
            })"""
        )
        assert page.evaluate("seen") == [f"{number / 9:.4f}" for number in range(4)]
        page.keyboard.press("Space")
        assert info(page, "bucket")["playing"] == "false"


def test_a_link_keeps_the_settings(explain, url):
    with explain() as page:
        unfold(page)
        page.locator("#tokens [data-input=machine] select").select_option("cpu")
        slide(page, "tokens", "gbits", 4)
        slide(page, "bucket", "joins", 2)
        link = page.evaluate("location.hash")
        assert page.get_attribute("#tokens .link", "href") == link.replace("#bucket", "#tokens")
        assert link == "#bucket?gbits=1&joins=3&machine=cpu"
        page.click("#bucket button:text-is('Reset')")
        assert page.evaluate("location.hash") == "#bucket"
        assert page.locator("#packets [data-input=gbits] output").text_content() == "10 Gbit/s"
    with explain(link=link) as page:
        assert page.locator("#tokens [data-input=machine] select").input_value() == "cpu"
        assert page.locator("#packets [data-input=gbits] output").text_content() == "1 Gbit/s"
        assert page.evaluate("scrollY") > 500, "at its scene"
        assert page.locator("#bucket [data-input=joins] output").text_content() == "3"
    with explain(link="#tokens?gbits=3&machine=tpu&toString=1&weights=NaN") as page:
        assert page.locator("#packets [data-input=gbits] output").text_content() == "10 Gbit/s"
        assert page.get_attribute("#tokens .link", "href") == "#tokens"


@pytest.mark.parametrize("width", [390, 1440])
def test_there_is_room_for_a_finger(explain, width):
    with explain(width=width) as page:
        unfold(page)
        small = page.evaluate(
            """[...document.querySelectorAll("button, select, summary, a, input:not([type=checkbox]), label.tick")]
                .map((each) => [each.outerHTML.slice(0, 80), each.getBoundingClientRect()])
                .filter(([, box]) => box.width < 44 || box.height < 44).map(([text]) => text)"""
        )
    assert small == []


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_every_width_and_theme(explain, width, theme):
    with explain(width=width, theme=theme) as page:
        for scene in SCENES:
            press(page, scene, "Home", "ArrowRight", "ArrowRight", "End")
            label = page.locator(f"#{scene} [role=img]").first.get_attribute("aria-label")
            assert len(label) > 20
        unfold(page)
        assert fits(page)
        page.evaluate("Promise.all(document.getAnimations().map((each) => each.finished))")
        assert not axe_findings(page)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (theme == "light")


def test_print_has_tables_and_no_controls(explain):
    with explain() as page:
        assert not page.locator("#tokens .numbers table").first.is_visible()
        page.emulate_media(media="print")
        for scene in SCENES:
            assert page.locator(f"#{scene} .numbers .sources").first.is_visible()
            assert not page.locator(f"#{scene} .toolbar").is_visible()
            assert page.locator(f"#{scene} [role=img]").first.is_visible()


def test_without_scripts_there_is_text(chromium, url):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(url)
    assert "need JavaScript" in page.inner_text("noscript")
    context.close()


@pytest.mark.timing
def test_the_first_paint_is_quick(explain, tmp_path, url):
    path = tmp_path / "page.html"
    path.write_text(single_file())
    for address in (url, path.as_uri()):
        times = []
        for _ in range(3):
            with explain(address) as page:
                paint = "performance.getEntriesByName('first-contentful-paint')"
                wait_until(page, f"{paint}.length")
                times.append(page.evaluate(f"{paint}[0].startTime"))
        assert min(times) < 500


# One file


def test_single_file_works_from_a_folder(explain, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(single_file())
    assert path.stat().st_size < 300_000
    with explain(path.as_uri()) as page:
        assert (
            page.evaluate("performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length")
            == 0
        )
        for scene in SCENES:
            press(page, scene, "Home")
            first = page.inner_html(f"#{scene} [data-status]")
            press(page, scene, "ArrowRight", "ArrowRight")
            assert page.inner_text(f"#{scene} [data-status]") != first or scene == "tokens"
        page.evaluate("location.hash = '#tokens?gbits=1'")
        assert page.evaluate("document.querySelector('#packets [data-input=gbits] output').textContent") == "1 Gbit/s"
    assert not re.search(r'(?:src|href)="(?!data:|#)', path.read_text())
