"""Rules of a search: required and forbidden phrases, penalties, excluded tokens."""
