"""What runs have left: ``replay`` weighs a dump by every correction, ``report`` draws verl's logs, ``figures``
counts.
"""
