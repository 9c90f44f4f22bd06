"""The report's sections: each reads RunData and gives a Section. `page` orders them."""
