"""A job's store in the process of the test."""

import threading


class MemoryStore:
    """A job's store in this process, with the calls of PyTorch's that the agreement makes."""

    def __init__(self):
        self.values = {}
        self._lock = threading.RLock()

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def add(self, key, n):
        with self._lock:
            self.set(key, str(int(self.values.get(key, b"0")) + n))
            return int(self.values[key])

    def check(self, keys):
        return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        with self._lock:
            if self.values.get(key, b"") == expected.encode():
                self.set(key, desired)
            return self.values.get(key, expected.encode())

    def delete_key(self, key):
        return self.values.pop(key, None) is not None
