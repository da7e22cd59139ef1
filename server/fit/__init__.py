"""How much of which model fits where: facts from headers, sums, placements. Pure, but for `probe`."""
