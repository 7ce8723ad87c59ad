"""A headless Chromium for tests of pages and for ``make_pictures.py``: its DevTools protocol over two pipes.

Needs Chromium on PATH (Debian: ``apt install chromium``) and no library. ``AXE`` names axe-core's ``axe.min.js``
(``npm install axe-core``); without it a checkout's ``node_modules`` is looked into.
"""

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ROOT = Path(__file__).resolve().parents[2]
_CANDIDATES = [os.environ.get("AXE"), ROOT / "node_modules" / "axe-core" / "axe.min.js"]
AXE = next((Path(path) for path in _CANDIDATES if path and Path(path).is_file()), None)
#: What the keyboard is to reach, where it is shown.
CONTROLS = "a[href], button, input, select, textarea, summary, [tabindex]:not([tabindex='-1'])"
_WAIT_S = 120.0


class Browser:
    """One Chromium process; a context manager."""

    def __init__(self, profile):
        args = [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--remote-debugging-pipe",
        ]
        args += [
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--mute-audio",
        ]
        args += ["--host-resolver-rules=MAP * ~NOTFOUND", "--force-color-profile=srgb", "--hide-scrollbars"]
        args += [f"--user-data-dir={profile}"]
        (read, self._send), (self._receive, write) = os.pipe(), os.pipe()
        read, write = (
            fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (read, write)
        )  # 3 and 4 are what it reads, writes
        shell = f'exec "$@" 3<&{read} 4>&{write}'
        quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *args], pass_fds=(read, write), **quiet
        )
        os.close(read)
        os.close(write)
        self._buffer, self._number, self.events = b"", 0, []
        self._page = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError, AssertionError):
            self.ask("Browser.close")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._send)
        os.close(self._receive)

    def ask(self, method, session=None, **parameters):
        """Send a command and wait for its result; events that come meanwhile are kept."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self.events.append(found)

    def wait_for(self, method, session):
        """The next event of that name of a page."""
        while True:
            for event in self.events:
                if event.get("method") == method and event.get("sessionId") == session:
                    self.events.remove(event)
                    return event["params"]
            self.events.append(self._next())

    def _next(self):
        end = time.monotonic() + _WAIT_S
        while b"\0" not in self._buffer:
            assert time.monotonic() < end, "the browser does not answer"
            data = os.read(self._receive, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(raw)

    def open(self, path, width, height=900, dark=False):
        """A :class:`Page` of the file ``path``, loaded and drawn; the page before it is closed."""
        if self._page is not None:  # one at a time: each is a process
            self.ask("Target.closeTarget", targetId=self._page.target)
        self._page = Page(self, Path(path), width, height, dark)
        return self._page


class Page:
    """One page in the browser."""

    def __init__(self, browser, path, width, height, dark):
        self.browser, self.width = browser, width
        self.target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.ask("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=path.resolve().as_uri())
        browser.wait_for("Page.loadEventFired", self.session)
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def ask(self, method, **parameters):
        return self.browser.ask(method, self.session, **parameters)

    def resize(self, width, height):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)

    def run(self, script):
        """What a script gives (a promise is waited for)."""
        found = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def errors(self):
        """What the page has written to the console as an error, or thrown."""
        said = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            p = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                said.append(p["exceptionDetails"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and p["type"] in ("error", "assert"):
                said.append(str([a.get("value") for a in p["args"]]))
            elif event["method"] == "Log.entryAdded" and p["entry"]["level"] == "error":
                said.append(p["entry"]["text"])
        return said

    def overflow(self):
        """Pixels by which the page is wider than its window."""
        return self.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def unreached(self):
        """Controls that are shown and that the Tab key does not come by."""
        count = self.run(f"""(() => {{
            const all = [...document.querySelectorAll({json.dumps(CONTROLS)})].filter(e => e.checkVisibility());
            all.forEach((e, i) => e.dataset.control = i);
            return all.length }})()""")
        seen = set()
        for _ in range(count + 3):
            for kind in ("rawKeyDown", "keyUp"):
                self.ask("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
            seen.add(self.run("document.activeElement.dataset.control || null"))
        missing = {str(i) for i in range(count)} - seen
        html = "document.querySelector('[data-control=\"{}\"]').outerHTML.slice(0, 200)"
        return count, [self.run(html.format(i)) for i in missing]

    def findings(self):
        """Axe-core's serious and critical findings: (rule, impact, the elements)."""
        self.run(AXE.read_text(encoding="utf-8") + "; 1")
        found = self.run("axe.run(document, {resultTypes: ['violations']}).then(r => r.violations)")
        return [
            (
                v["id"],
                v["impact"],
                [n["html"][:160] + " " + n.get("failureSummary", "") for n in v["nodes"]][:4],
            )
            for v in found
            if v["impact"] in ("serious", "critical")
        ]

    def picture(self, path, height=None):
        """A PNG of the window, or of the page's first ``height`` pixels."""
        clip = {}
        if height:
            clip["clip"] = {"x": 0, "y": 0, "width": self.width, "height": height, "scale": 1}
            clip["captureBeyondViewport"] = True
        shot = self.ask("Page.captureScreenshot", format="png", optimizeForSpeed=False, **clip)
        Path(path).write_bytes(base64.b64decode(shot["data"]))
