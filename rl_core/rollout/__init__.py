"""The rollout side: prompts, engines, workers and the pump that leases prompts to them."""
