#include "place.h"

PyMethodDef place_methods[] = {
	{ NULL, NULL, 0, NULL },
};
