"""``logger.info_once(message, key=...)``: one line per key, kept for the tests to read."""


class Logger:
    """Keeps every line in ``lines``, as ``(severity, text)``."""

    def __init__(self) -> None:
        self.lines = []
        self._seen = set()

    def _add(self, severity, parts):
        self.lines.append((severity, " ".join(str(part) for part in parts)))

    def info(self, *parts):
        self._add("info", parts)

    def warning(self, *parts):
        self._add("warning", parts)

    def error(self, *parts):
        self._add("error", parts)

    def info_once(self, *parts, key):
        if key not in self._seen:
            self._seen.add(key)
            self._add("info", parts)


logger = Logger()
