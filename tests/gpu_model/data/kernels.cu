// The kernels of kernels.sass, as `nvdisasm --print-code --print-instruction-encoding` prints what NVRTC makes of them
// for sm_86.

extern "C" __global__ void copy(const float *from, float *to) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = from[i];
}

extern "C" __global__ void strided(const float *from, float *to) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = from[i * 8];
}

extern "C" __global__ void guarded(const float *from, float *to, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i];
}

// Square matrices of 32 * `tiles` rows; blocks of 32 x 32 threads.
extern "C" __global__ void product(const float *a, const float *b, float *c, int tiles) {
    __shared__ float left[32][32], right[32][32];
    const int x = threadIdx.x, y = threadIdx.y, size = 32 * tiles;
    float sum = 0;
    for (int tile = 0; tile < tiles; ++tile) {
        left[y][x] = a[(blockIdx.y * 32 + y) * size + tile * 32 + x];
        right[y][x] = b[(tile * 32 + y) * size + blockIdx.x * 32 + x];
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < 32; ++k) sum += left[y][k] * right[k][x];
        __syncthreads();
    }
    c[(blockIdx.y * 32 + y) * size + blockIdx.x * 32 + x] = sum;
}

// Reads a column of a tile of 32 x 32: all lanes of a warp in one bank.
extern "C" __global__ void transpose(const float *from, float *to) {
    __shared__ float tile[32][32];
    tile[threadIdx.y][threadIdx.x] = from[threadIdx.y * 32 + threadIdx.x];
    __syncthreads();
    to[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}
