/* The receiver's half: segments that were received, put into place. */
#ifndef MCAST_CAST_PLACE_H
#define MCAST_CAST_PLACE_H

#include "plane.h"

/* Add the type Placer to the module; false if that succeeds. */
int add_placer(PyObject *module);

#endif
