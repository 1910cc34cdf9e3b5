"""Settings of the client, which has none here."""

from __future__ import annotations


class _Setting:
    value: object = None

    def is_set(self) -> bool:
        return self.value is not None

    def set(self, value: object) -> None:
        self.value = value


MLFLOW_HTTP_REQUEST_MAX_RETRIES = _Setting()
MLFLOW_HTTP_REQUEST_TIMEOUT = _Setting()
