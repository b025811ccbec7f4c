"""Policy, guardrails, budgets and approvals."""
