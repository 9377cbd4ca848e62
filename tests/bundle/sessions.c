/* sessions BUNDLE RUNS: two threads, each with a session of its own and with one that both share, feed different
   numbers and compare every result with that of the first run. Wrong use in between is refused and changes nothing. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hybridc.h"

enum { kElements = 32, kResults = 24 };

typedef struct Work {
  const char* folder;
  hybridc_session* shared;
  int runs, seed, failed;
} Work;

static int run(hybridc_session* session, const float* x, float* y) {
  const int64_t shape[] = {4, 8};
  const hybridc_input_array input = {"the/x", "float32", shape, 2, x};
  int64_t found[2] = {0, 0};
  hybridc_output_array output = {"out/0", y, kResults * sizeof *y, found, 0};
  const int code = hybridc_run(session, &input, 1, &output, 1);
  return code != 0 ? code : found[0] == 4 && found[1] == 6 && output.size_bytes == kResults * sizeof *y ? 0 : -1;
}

static int refusals(hybridc_session* session, const float* x) {
  const int64_t shape[] = {4, 8}, turned[] = {8, 4};
  float y[kResults];
  const hybridc_input_array good = {"the/x", "float32", shape, 2, x};
  hybridc_input_array bad[] = {good, good, good, good, good};
  bad[0].name = "z", bad[1].dtype = "float64", bad[2].shape = turned, bad[3].data = NULL, bad[4].rank = 1;
  const int codes[] = {551, 553, 554, 553, 554};
  hybridc_output_array output = {"out/0", y, sizeof y, NULL, 0}, unknown = {"y", y, sizeof y, NULL, 0};
  hybridc_output_array small = {"out/0", y, sizeof y - 1, NULL, 0}, nowhere = {"out/0", NULL, sizeof y, NULL, 0};
  hybridc_port port;
  for (size_t i = 0; i < sizeof codes / sizeof *codes; ++i) {
    if (hybridc_run(session, &bad[i], 1, &output, 1) != codes[i]) return 1;
  }
  const hybridc_input_array twice[] = {good, good};
  if (hybridc_run(session, twice, 2, &output, 1) != 551) return 1;
  if (hybridc_run(session, NULL, 0, &output, 1) != 552) return 1;
  if (hybridc_run(session, &good, 1, &unknown, 1) != 555) return 1;
  if (hybridc_run(session, &good, 1, &small, 1) != 563) return 1;
  if (hybridc_run(session, &good, 1, &nowhere, 1) != 563) return 1;
  if (hybridc_input(session, 1, &port) != 551 || hybridc_output(session, 3, &port) != 555) return 1;
  return strstr(hybridc_last_error(), "error[HC555]: there is no output 3") == NULL;
}

static void* work(void* given) {
  Work* task = given;
  hybridc_options options = {sizeof options, 2, 0, 0, UINT64_MAX};
  hybridc_session* own;
  float x[kElements], first[kResults], again[kResults];
  task->failed = 1;
  for (int i = 0; i < kElements; ++i) x[i] = (float)((i * 7 + task->seed) % 11) - 5.0f;
  if (hybridc_open(task->folder, &options, &own) != 0) return NULL;
  int failed = run(own, x, first) != 0 || refusals(task->shared, x) != 0;
  for (int i = 0; i < task->runs && !failed; ++i) {
    memset(again, 0, sizeof again);
    failed = run(i % 2 == 0 ? task->shared : own, x, again) != 0 || memcmp(first, again, sizeof first) != 0;
  }
  hybridc_step steps[2];
  const int64_t shape[] = {4, 8};
  const hybridc_input_array input = {"the/x", "float32", shape, 2, x};
  failed |= hybridc_step_count(own) != 2 || hybridc_measure(own, &input, 1, steps) != 0 || steps[1].lane != 1;
  failed |= hybridc_measure(own, NULL, 0, steps) != 552 || run(own, x, again) != 0;
  failed |= memcmp(first, again, sizeof first) != 0;
  hybridc_close(own);
  task->failed = failed;
  return NULL;
}

int main(int count, char** words) {
  hybridc_session *shared = NULL, *none;
  hybridc_memory memory;
  if (count != 3 || hybridc_open(words[1], NULL, &shared) != 0) return 1;
  if (hybridc_open("/nowhere", NULL, &none) != 301 || none != NULL) return 1;
  if (hybridc_open(NULL, NULL, &none) != 301 || none != NULL) return 1;
  hybridc_options unsized = {0};
  if (hybridc_open(words[1], &unsized, &none) != 500 || none != NULL) return 1;
  if (hybridc_get_memory(shared, &memory) != 0 || memory.host_allocated_bytes != memory.host_planned_bytes) return 1;
  Work tasks[2] = {{words[1], shared, atoi(words[2]), 0, 0}, {words[1], shared, atoi(words[2]), 3, 0}};
  pthread_t threads[2];
  for (int i = 0; i < 2; ++i) pthread_create(&threads[i], NULL, work, &tasks[i]);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
  hybridc_close(shared);
  hybridc_close(NULL);
  if (tasks[0].failed || tasks[1].failed) fprintf(stderr, "%s\n", hybridc_last_error());
  return tasks[0].failed || tasks[1].failed;
}
