"""Random programs with random changes between calls: none is silently wrong past an audit."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.random_changes import Plan, check, plans


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans)
def test_random_program_is_right_at_every_audit(plan: Plan) -> None:
    check(plan)


@pytest.mark.long
@pytest.mark.timeout(400)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans)
def test_more_random_programs_are_right_at_every_audit(plan: Plan) -> None:
    check(plan)
