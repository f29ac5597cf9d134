"""Where each norm sits on the residual stream, by dataflow."""

from normkit.audit.place.branches import Branch as Branch
from normkit.audit.place.flow import NormCall as NormCall
from normkit.audit.place.flow import NormSite as NormSite
from normkit.audit.place.seats import PlaceResult as PlaceResult
from normkit.audit.place.seats import module_norm as module_norm
from normkit.audit.place.seats import place as place

__all__ = ["Branch", "NormCall", "NormSite", "PlaceResult", "module_norm", "place"]
