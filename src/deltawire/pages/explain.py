"""The page with the four figures: as one file, or served on this machine only.

The figures are ES modules that import each other through an import map. In the single file the map has data: URLs,
since browsers load no module files for a page that was opened from a folder.
"""

import base64
import hashlib
import json
import re
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deltawire.hosts import listen

STATIC = Path(__file__).parent / "static"
PAGE = STATIC / "explain" / "index.html"
HOST = "127.0.0.1"

_INLINE = re.compile(r'<script type="(?:importmap|module)">(.*?)</script>', re.DOTALL)
_MAP = re.compile(r'(<script type="importmap">)(.*?)(</script>)', re.DOTALL)
_STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)">')


def single_file() -> str:
    """The whole page as one HTML file, which works from any folder."""

    def styled(match: re.Match[str]) -> str:
        return f"<style>\n{(PAGE.parent / match[1]).read_text()}</style>"

    def mapped(match: re.Match[str]) -> str:
        imports = json.loads(match[2])["imports"]
        for name, target in imports.items():
            code = base64.b64encode((PAGE.parent / target).read_bytes()).decode()
            imports[name] = f"data:text/javascript;base64,{code}"
        return match[1] + json.dumps({"imports": imports}) + match[3]

    html = _MAP.sub(mapped, _STYLE.sub(styled, PAGE.read_text()))
    # A `<` could end the element early; escaped it means the same in JSON.
    recorded = (PAGE.parent / "recorded.json").read_text().replace("<", "\\u003c")
    policy = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
    charset = '<meta charset="utf-8">'
    html = html.replace(charset, f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">')
    return html.replace("</main>", f'</main>\n<script type="application/json" id="recorded">{recorded}</script>')


def content_policy(html: str) -> str:
    """Allow the inline scripts of the page, by hash, and files of its own address; nothing else."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in _INLINE.findall(html)]
    scripts = " ".join(["'self'", *(f"'sha256-{each}'" for each in hashes)])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class PageHandler(SimpleHTTPRequestHandler):
    """Serves the files of a page, and logs nothing: the terminal belongs to the command."""

    page, entry = PAGE, "/explain/"

    def send_head(self) -> Any:
        path = Path(self.translate_path(self.path))
        if path == STATIC / "base.css" or self.page.parent in (path, path.parent):
            return super().send_head()
        if path != STATIC:
            return self.send_error(HTTPStatus.NOT_FOUND)
        self.send_response(HTTPStatus.FOUND)
        self.send_header("Location", self.entry)
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def guess_type(self, path: Any) -> str:
        return f"{super().guess_type(path)}; charset=utf-8"

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", content_policy(self.page.read_text()))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


class PageServer(ThreadingHTTPServer):
    """A server of a page on this machine, bound but not yet running; port 0 takes a free one."""

    def __init__(self, port: int = 0, handler: type[PageHandler] = PageHandler) -> None:
        super().__init__((HOST, port), partial(handler, directory=str(STATIC)), bind_and_activate=False)
        self.socket.close()
        self.socket = listen(HOST, port)
        self.url = f"http://{HOST}:{self.socket.getsockname()[1]}{handler.entry}"
