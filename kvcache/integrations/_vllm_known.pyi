from typing import Any

def use(
    methods: dict[str, Any],
    manager: Any,
    coordinator: Any,
    single: Any,
    interface: Any,
    status: Any,
) -> None: ...
