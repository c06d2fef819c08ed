/* The receiver's half: segments that were received, put into place. */
#ifndef MCAST_CAST_PLACE_H
#define MCAST_CAST_PLACE_H

#include "plane.h"

extern PyMethodDef place_methods[];

#endif
