"""How hard a property is tried: few examples in `make test`, as many as it needs in `test-all`."""

from hypothesis import settings


def examples(*, quick: int, thorough: int) -> settings:
    """Settings with that many examples under the profile of that name."""
    is_thorough = settings.get_current_profile_name() == "thorough"
    return settings(max_examples=thorough if is_thorough else quick)
