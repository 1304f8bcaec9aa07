"""The roles: loops that fit on a screen, handed everything they need already built."""
