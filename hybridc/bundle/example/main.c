/* Opens a bundle, feeds zeros, runs once, and prints names, types and sizes of the outputs. */
#include <stdio.h>
#include <stdlib.h>

#include "hybridc.h"

static int fail(void) {
  fprintf(stderr, "%s\n", hybridc_last_error());
  return EXIT_FAILURE;
}

int main(int count, char** words) {
  if (count != 2) {
    fprintf(stderr, "usage: main BUNDLE\n");
    return EXIT_FAILURE;
  }
  hybridc_session* session;
  if (hybridc_open(words[1], NULL, &session) != 0) return fail();
  const size_t input_count = hybridc_input_count(session), output_count = hybridc_output_count(session);
  hybridc_input_array* inputs = calloc(input_count + 1, sizeof *inputs);
  hybridc_output_array* outputs = calloc(output_count + 1, sizeof *outputs);
  int status = inputs == NULL || outputs == NULL ? EXIT_FAILURE : EXIT_SUCCESS;

  for (size_t i = 0; i < input_count && status == EXIT_SUCCESS; ++i) {
    hybridc_port port;
    hybridc_input(session, i, &port);
    inputs[i] = (hybridc_input_array){port.name, port.dtype, port.shape, port.rank, calloc(1, port.size_bytes + 1)};
    if (inputs[i].data == NULL) status = EXIT_FAILURE;
  }
  for (size_t i = 0; i < output_count && status == EXIT_SUCCESS; ++i) {
    hybridc_port port;
    hybridc_output(session, i, &port);
    outputs[i] = (hybridc_output_array){port.name, malloc(port.size_bytes + 1), port.size_bytes, NULL, 0};
    if (outputs[i].data == NULL) status = EXIT_FAILURE;
  }
  if (status == EXIT_SUCCESS && hybridc_run(session, inputs, input_count, outputs, output_count) != 0) status = fail();
  for (size_t i = 0; i < output_count && status == EXIT_SUCCESS; ++i) {
    hybridc_port port;
    hybridc_output(session, i, &port);
    printf("%s: %s, %zu bytes\n", port.name, port.dtype, outputs[i].size_bytes);
  }

  for (size_t i = 0; inputs != NULL && i < input_count; ++i) free((void*)inputs[i].data);
  for (size_t i = 0; outputs != NULL && i < output_count; ++i) free(outputs[i].data);
  free(inputs);
  free(outputs);
  hybridc_close(session);
  return status;
}
