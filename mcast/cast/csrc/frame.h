/* The sender's half: headers of segments. */
#ifndef MCAST_CAST_FRAME_H
#define MCAST_CAST_FRAME_H

#include "plane.h"

extern PyMethodDef frame_methods[];

#endif
