/* Declarations for Python. Read by cffi and by the C compiler alike: declarations only, no directives.
 *
 * Calls return 0 or a count, or -errno. Times are nanoseconds. Sockaddrs come as the kernel lays them out.
 *
 * What is made is written to a place that belongs to an object of Python, and what is freed is taken from there, both in
 * the call: so whenever an exception comes in Python, an object owns what is open. To free nothing is no error.
 */

struct mcast_channel;
struct mcast_id;
struct ibv_pd;
struct ibv_ah;
struct ibv_mr;
struct ibv_context;
struct mcast_qp;

/* --- dynload.c --- */

int mcast_load(const char *rdmacm, const char *ibverbs, char *reason, size_t size);
int mcast_has_join_ex(void);
const char *mcast_verbs_library(void); /* the file that libibverbs was loaded from, "" if it is not known */
int mcast_fork_init(void);

/* --- devices.c --- */

struct mcast_device {
	char name[64];
	uint64_t node_guid;
	uint32_t max_mcast_grp;
	uint32_t max_mcast_qp_attach;
	uint32_t max_qp_wr;
	uint32_t ports;
};

struct mcast_port {
	uint32_t state;
	uint32_t is_ethernet;
	uint32_t active_mtu;
	uint32_t max_mtu;
	uint32_t lid;
	uint32_t gids;
	uint32_t qkey_violations;
	double rate;
};

struct mcast_gid {
	uint32_t port;
	uint32_t index;
	uint32_t ifindex; /* 0: unknown */
	uint8_t gid[16];
};

struct mcast_netdev_address {
	char netdev[16];
	uint32_t bytes;
	uint8_t address[16];
};

int mcast_device_names(char (*names)[64], uint32_t max);
int mcast_open_device(const char *name, struct ibv_context **context);
void mcast_close_device(struct ibv_context **context);
int mcast_query_device(struct ibv_context *context, struct mcast_device *device);
int mcast_query_port(struct ibv_context *context, uint32_t port, struct mcast_port *out);
int mcast_query_gid(struct ibv_context *context, uint32_t port, uint32_t index, uint8_t *gid);
int mcast_query_gids(struct ibv_context *context, struct mcast_gid *out, uint32_t max);
int mcast_netdev_addresses(struct mcast_netdev_address *out, uint32_t max);
int mcast_sync_devices(void);
int mcast_comp_vectors(struct ibv_context *context);

/* --- cm.c --- */

struct mcast_event {
	int32_t type;
	int32_t status;
	int32_t error;
	int32_t is_taken; /* and not forgotten by whoever gave the room */
	uint64_t id_token;
	uint64_t join_token;
	/* from here on: rdma_ud_param, of multicast events only */
	uint32_t qp_num;
	uint32_t qkey;
	uint32_t flow_label;
	uint16_t dlid;
	uint8_t sl;
	uint8_t port_num;
	uint8_t is_global;
	uint8_t sgid_index;
	uint8_t hop_limit;
	uint8_t traffic_class;
	uint8_t static_rate;
	uint8_t dgid[16];
};

int mcast_open_channel(struct mcast_channel **channel);
int mcast_channel_fd(struct mcast_channel *channel);
void mcast_close_channel(struct mcast_channel *channel, int has_ids);
void mcast_free_channel(struct mcast_channel **channel);
int mcast_has_event(struct mcast_channel *channel);
int mcast_take_event(struct mcast_channel *channel, struct mcast_event *event);

int mcast_create_id(struct mcast_channel *channel, uint64_t token, int port_space, struct mcast_id **id);
int mcast_destroy_id(struct mcast_id *id);
void mcast_free_id(struct mcast_id **id);
int mcast_bind_addr(struct mcast_id *id, const void *address);
int mcast_resolve_addr(struct mcast_id *id, const void *source, const void *destination, int timeout_ms);
int mcast_join(struct mcast_id *id, const void *address, uint64_t token);
int mcast_join_ex(struct mcast_id *id, uint32_t comp_mask, uint32_t join_flags, const void *address,
		  uint64_t token);
int mcast_leave(struct mcast_id *id, const void *address);
const char *mcast_id_device(struct mcast_id *id);
struct ibv_context *mcast_id_context(struct mcast_id *id);
int mcast_id_port(struct mcast_id *id);

/* The P_Key of the interface that the id is bound to. It has no meaning on Ethernet. */
int mcast_id_pkey(struct mcast_id *id);

/* --- qp.c, memory.c --- */

struct mcast_qp_init {
	int qp_type;
	uint32_t send_depth;
	uint32_t send_room;
	uint32_t send_stride;
	uint64_t send_offset;
	uint32_t recv_depth;
	uint32_t recv_room;
	uint32_t recv_stride;
	uint64_t recv_offset;
	uint32_t grh_stride;
	int block_loopback;
	int is_ethernet;
	uint32_t comp_vector;
	uint32_t moderation_count;  /* received messages until an event tells of them; 0: one */
	uint32_t moderation_period; /* microseconds until an event tells of fewer */
	int timestamps;
	int64_t busy_poll; /* nanoseconds that a thread looks before it sleeps */
	void *slab;
	uint64_t slab_bytes;
};

/* The clock of the messages' time stamps, and the optional features that the device refused. */
enum { STAMPS_NONE, STAMPS_REALTIME, STAMPS_DEVICE };
enum { REFUSED_NOTHING, REFUSED_TIMESTAMPS, REFUSED_MODERATION };

int mcast_alloc_pd(struct mcast_id *id, struct ibv_pd **pd);
int mcast_dealloc_pd(struct ibv_pd **pd);
int mcast_create_qp(struct mcast_id *id, struct ibv_pd *pd, const struct mcast_qp_init *init,
		    struct mcast_qp **out, int *refused);
int mcast_clock(struct mcast_qp *qp);
int mcast_close_qp(struct mcast_qp *qp, int64_t linger);
int mcast_drain(struct mcast_qp *qp, int64_t budget); /* as a flush that no signal ends: 1, or 0: too late */
void mcast_free_qp(struct mcast_qp *qp);
uint32_t mcast_qp_num(struct mcast_qp *qp);
int mcast_query_qp(struct mcast_qp *qp);
int mcast_modify_qp(struct mcast_qp *qp, int state, int keeps_failure);
int mcast_attach(struct mcast_qp *qp, const uint8_t *gid, uint16_t lid);
int mcast_detach(struct mcast_qp *qp, const uint8_t *gid, uint16_t lid);
int mcast_detach_late(struct mcast_qp *qp, const uint8_t *gid, uint16_t lid);
int mcast_register(struct ibv_pd *pd, void *address, uint64_t bytes, int writable, int relaxed, struct ibv_mr **mr);
int mcast_has_dmabuf(void);
int mcast_register_dmabuf(struct ibv_pd *pd, int fd, uint64_t offset, uint64_t bytes, uint64_t iova, int writable,
			  int relaxed, struct ibv_mr **mr);
uint32_t mcast_lkey(struct ibv_mr *mr);
int mcast_deregister(struct ibv_mr **mr);

struct mcast_ah_init {
	uint8_t gid[16];
	uint32_t flow_label;
	uint16_t dlid;
	uint8_t sl;
	uint8_t port_num;
	uint8_t sgid_index;
	uint8_t hop_limit;
	uint8_t traffic_class;
	uint8_t is_global;
	uint8_t static_rate;
	uint8_t src_path_bits;
};

int mcast_new_ah(struct mcast_qp *qp, const struct mcast_ah_init *init, uint64_t *serial);
void mcast_retire_ah(struct mcast_qp *qp, uint64_t serial);

struct mcast_region {
	uintptr_t start;
	uintptr_t end;
	uint32_t lkey;
	uint32_t is_device; /* no memory is there for the CPU: only the device finds it by these addresses */
	uint32_t is_constant; /* nobody changes it: a send from there is not waited for */
};

int mcast_set_regions(struct mcast_qp *qp, const struct mcast_region *regions, uint32_t count);

struct mcast_failure {
	int status;	 /* ibv_wc_status, 0: none was seen */
	int reason;	 /* 0; or the ibv_event_type that reported the failure, plus 1; GONE, IMPOSSIBLE */
	uint64_t unsent; /* sends that were posted, and not carried out */
};

enum { GONE = 1000, IMPOSSIBLE = 1001 };

void mcast_read_failure(struct mcast_qp *qp, struct mcast_failure *out);
void mcast_read_async(struct mcast_qp *qp);
uint32_t mcast_port_changes(struct mcast_qp *qp);

/* Write the port events since the last call to `out`. Return their number, at most PORT_EVENTS, or -errno. */
enum { PORT_EVENTS = 64 };
int mcast_read_port_events(struct mcast_qp *qp, uint8_t *out);

/* --- messages and counters --- */

struct mcast_message {
	uint64_t offset;
	uint32_t length;
	uint32_t src_qp;
	uint32_t imm;
	uint32_t slot;
	uint8_t has_imm;
	uint8_t own_qp_num;
	uint16_t src_lid;
	uint16_t generation;
	uint8_t sl;
	uint8_t path_bits;
	uint8_t source[16];
	uint8_t group[16];
	uint64_t timestamp; /* nanoseconds; 0 where there are none */
};

struct mcast_counters {
	uint64_t sent;
	uint64_t received;
	uint32_t recv_free;
	uint32_t recv_low_water;
	uint64_t recv_empty; /* number of polls that found no free receive left */
	uint64_t unsent;     /* sends that were posted, and not carried out */
	uint64_t dropped_reset;	  /* received, and not yet read at a reset */
	uint64_t dropped_invalid; /* by a completion that cannot be true */
};

int mcast_recv_fd(struct mcast_qp *qp);
int mcast_send_fd(struct mcast_qp *qp);
void mcast_read_counters(struct mcast_qp *qp, struct mcast_counters *out);
int mcast_is_receiving(struct mcast_qp *qp);
int mcast_receive_into(struct mcast_qp *qp, struct ibv_mr *mr, uint64_t address, uint64_t slot, uint32_t count);
