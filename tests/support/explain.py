"""What the tests of `deltawire explain` do with its page."""

import json

from support import ROOT

SCENES = ("weight", "packets", "tokens", "bucket")
RECORDED = json.loads((ROOT / "src/deltawire/pages/static/explain/recorded.json").read_text())


def info(page, scene):
    return page.evaluate("id => ({...document.getElementById(id).dataset})", scene)


def slide(page, scene, name, index):
    """Move a slider to one of its values."""
    page.evaluate(
        """([scene, name, index]) => {
            const range = document.querySelector(`#${scene} [data-input=${name}] input`);
            range.value = index;
            range.dispatchEvent(new Event("input"));
        }""",
        [scene, name, index],
    )


def unfold(page):
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")


def press(page, scene, *keys):
    page.focus(f"#{scene}")
    for key in keys:
        page.keyboard.press(key)


def wait_until(page, condition):
    """The page's policy forbids what Playwright waits with."""
    page.evaluate(
        f"new Promise((done) => {{ const look = () => {condition} ? done() : requestAnimationFrame(look); look(); }})"
    )


def position_of(scene):
    return f"Number(document.getElementById('{scene}').dataset.position)"
