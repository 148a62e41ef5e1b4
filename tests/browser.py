"""What each page must keep to, in every width and theme."""

WIDTHS = (360, 1440)
THEMES = ("light", "dark")


def serious_problems(page):
    """What axe calls serious or worse, as text."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {each['help']}: {node['html'][:200]}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def fits(page):
    """Whether nothing sticks out of the page at the side."""
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
