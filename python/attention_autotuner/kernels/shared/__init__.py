"""Rules, schedules and costs that several kernel families share."""
