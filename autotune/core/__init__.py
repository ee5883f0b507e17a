"""Pure nouns: units, facts about machines and data, trials, outcomes, the profile."""
