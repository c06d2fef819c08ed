/* The address handles of a QP, which `struct sending` owns: Python knows a handle by its serial number.
 *
 * A device may read a handle until the last send to it is complete. So a handle that is not wanted any more is retired,
 * which keeps new sends from it, and destroyed by a later sweep. The lock of the QP guards all; nobody waits here. */
#ifndef MCAST_HANDLES_H
#define MCAST_HANDLES_H

#include "dynload.h"

struct mcast_ah {
	struct ibv_ah *ah;
	uint64_t serial;
	uint64_t end; /* of the last send to it */
	int is_retired;
	struct mcast_ah *next;
};

struct address_handles {
	struct mcast_ah *first; /* the one used last */
	uint64_t last_serial;
};

/* A handle that is in no list yet; or -errno. Without the lock. */
int mcast_make_ah(struct ibv_pd *pd, const struct mcast_ah_init *init, struct mcast_ah **out);

/* Take the handle into the list, and return its serial number. */
uint64_t mcast_add_ah(struct address_handles *self, struct mcast_ah *new);

/* The handle with that serial number, NULL if it is retired. */
struct mcast_ah *mcast_find_ah(struct address_handles *self, uint64_t serial);

/* Retire all handles, so that no message is posted to them any more. */
void mcast_retire_all_ahs(struct address_handles *self);

/* Destroy the handles that were retired, if the sends before `tail` are all that they were used for. The first error;
 * what failed stays for another time. */
int mcast_sweep_ahs(struct address_handles *self, uint64_t tail);

#endif
