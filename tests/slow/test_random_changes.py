"""Random programs with random changes between calls: none is silently wrong past an audit."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.random_changes import Plan, check, plans


@pytest.mark.timeout(400)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans)
def test_random_program_is_right_at_every_audit(plan: Plan) -> None:
    check(plan)
