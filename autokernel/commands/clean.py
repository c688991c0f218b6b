def clean() -> None:
    """x"""
