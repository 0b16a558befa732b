"""Import of optional packages."""

from regard.errors import require_package as require_package
