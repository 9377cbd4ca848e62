/* Runs a bundle that `hybridc bundle` has written: C11, no C++, no Python.
 *
 *     hybridc_session *session;
 *     if (hybridc_open("net", NULL, &session) != 0) puts(hybridc_last_error());
 *
 * Functions that can fail return 0, or the number of the error: 304 of HC304, as docs/errors.md lists them. The
 * text of the last failure in the calling thread is `hybridc_last_error()`. A session may be used by several threads:
 * their runs are done one after the other. Several sessions may be open at once. A process that was forked must open
 * sessions of its own. Pointers must be valid where the text does not say that they may be NULL.
 */
#ifndef HYBRIDC_H_
#define HYBRIDC_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HYBRIDC_API __attribute__((visibility("default")))

/* A bundle that is ready to run, with the memory that its runs need. */
typedef struct hybridc_session hybridc_session;

/* How a bundle is opened. Zero bytes stand for the defaults: `hybridc_options o = {sizeof o};`. */
typedef struct hybridc_options {
  size_t struct_bytes;       /* sizeof(hybridc_options), so that later versions may add members; 500 if less */
  int32_t threads;           /* of the CPU's kernels; 0: as the model was compiled for, else all cores of the process */
  int32_t trust_weights;     /* not 0: weights.bin is not read through at once to check its hash */
  uint64_t gpu_memory_bytes; /* takes the plan of the largest budget of at most so many; 0: the GPU's free memory */
  uint64_t host_memory_bytes; /* limits arena and staging on the host; 0: as the model was compiled for */
} hybridc_options;

/* An input or output. Its strings and shape live as long as the session. */
typedef struct hybridc_port {
  const char* name;
  const char* dtype; /* as numpy, or the package ml_dtypes, names it: "float32" */
  const int64_t* shape;
  size_t rank;
  size_t size_bytes;
  int32_t varies; /* not 0: an output whose size follows from data, of which these are the most that it can have */
} hybridc_port;

/* What is known of the model and its compilation. Strings live as long as the session. */
typedef struct hybridc_model {
  const char* name;   /* of the model's file */
  const char* sha256; /* of its bytes, 64 hexadecimal digits */
  int64_t opset;
  const char* target;
  const char* hybridc_version; /* and those of TVM, which compiled it */
  const char* tvm_version;
  const char* tvm_ffi_version;
} hybridc_model;

/* What a run is fed: elements in row-major order. */
typedef struct hybridc_input_array {
  const char* name;
  const char* dtype;
  const int64_t* shape;
  size_t rank;
  const void* data;
} hybridc_input_array;

/* What a run fills. */
typedef struct hybridc_output_array {
  const char* name;      /* which output */
  void* data;            /* the caller's, for the elements in row-major order */
  size_t capacity_bytes; /* of `data`: at least `size_bytes` of the port */
  int64_t* shape;        /* NULL, or room for as many numbers as the port's rank: what shape the output has */
  size_t size_bytes;     /* set by the run */
} hybridc_output_array;

/* Bytes of a session: what the plan promised, and what was allocated. */
typedef struct hybridc_memory {
  uint64_t gpu_planned_bytes;
  uint64_t gpu_allocated_bytes;
  uint64_t host_planned_bytes;
  uint64_t host_allocated_bytes;
  uint64_t staging_bytes;       /* pinned memory from which streamed weights are copied */
  uint64_t mapped_weight_bytes; /* pages of the weights' file are loaded as they are used */
} hybridc_memory;

/* A step of the plan, and when a run did it. */
typedef struct hybridc_step {
  const char* name; /* of the kernel, or of the tensor that is copied; lives as long as the session */
  int32_t lane;     /* 0: the GPU, 1: the CPU, 2: copies to the GPU, 3: copies to the host */
  double planned_us;
  double begin_us, end_us; /* since the begin of the run */
} hybridc_step;

/* What the last failure in this thread was: code, cause, place and remedy. Valid until the next failure in it. */
HYBRIDC_API const char* hybridc_last_error(void);

/* Opens the bundle in a folder; `options` may be NULL. On failure `*session` is NULL. */
HYBRIDC_API int hybridc_open(const char* folder, const hybridc_options* options, hybridc_session** session);

/* Frees everything; NULL does no harm. No other thread may use the session any more. */
HYBRIDC_API void hybridc_close(hybridc_session* session);

HYBRIDC_API size_t hybridc_input_count(const hybridc_session* session);
HYBRIDC_API size_t hybridc_output_count(const hybridc_session* session);

/* Describes an input or output, in the model's order. 551 or 555 where there is none of that index. */
HYBRIDC_API int hybridc_input(const hybridc_session* session, size_t index, hybridc_port* port);
HYBRIDC_API int hybridc_output(const hybridc_session* session, size_t index, hybridc_port* port);

HYBRIDC_API int hybridc_get_model(const hybridc_session* session, hybridc_model* model);

/* How many threads run the CPU's kernels. */
HYBRIDC_API int32_t hybridc_thread_count(const hybridc_session* session);

/* What the planner predicts that a run takes. */
HYBRIDC_API double hybridc_predicted_us(const hybridc_session* session);

/* Feeds every input, runs, and fills the outputs that are asked for. What a failed run has filled is undefined. Buffers
   of outputs must not overlap each other, nor that of an input that is an output itself; no other thread may write to
   what is fed. */
HYBRIDC_API int hybridc_run(hybridc_session* session, const hybridc_input_array* inputs, size_t input_count,
                            hybridc_output_array* outputs, size_t output_count);

/* How many steps the plan has. */
HYBRIDC_API size_t hybridc_step_count(const hybridc_session* session);

/* Feeds every input and runs once, to measure each step, in the order of the plan; `steps` has room for all of them.
   Clocks of CPU and GPU are put together to some microseconds. Later runs are a little slower. */
HYBRIDC_API int hybridc_measure(hybridc_session* session, const hybridc_input_array* inputs, size_t input_count,
                                hybridc_step* steps);

HYBRIDC_API int hybridc_get_memory(const hybridc_session* session, hybridc_memory* memory);

#ifdef __cplusplus
}
#endif

#endif
