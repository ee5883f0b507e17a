"""How the check goes: its machine, its time, its stages in turn, what they find, and the page of it."""
