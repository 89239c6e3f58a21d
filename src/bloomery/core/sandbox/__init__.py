"""The sandbox in which programs run that a model wrote"""
