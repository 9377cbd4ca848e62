// Executes AMX instructions on processors that lack them.
//
// There such an instruction raises SIGILL. The handler decodes it, carries it out on tiles of the thread that
// met it, and lets the thread go on behind it. (Intel 64 and IA-32 Architectures Software Developer's Manual,
// volume 1, chapter on AMX, and volume 2: encodings and operation of LDTILECFG, STTILECFG, TILERELEASE,
// TILEZERO, TILELOADD, TILESTORED, TDPBF16PS and TDPB[SU][SU]D.)
//
// What the manual forbids, and a start row other than zero, which only interrupted instructions leave, is left
// to the handler from before, that is: it kills the process. So is every other instruction.
#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kTiles = 8, kMaxRows = 16, kRowBytes = 64;

struct Configuration {  // as LDTILECFG reads it
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];  // of which eight are reserved
  uint8_t rows[16];
};
static_assert(sizeof(Configuration) == 64);

struct Tile {
  alignas(64) uint8_t row[kMaxRows][kRowBytes];
};

struct Unit {
  Configuration configuration;  // palette 0: tiles are not configured
  Tile tiles[kTiles];

  bool configured(int t) const { return configuration.palette == 1 && t < kTiles && rows(t) > 0; }
  int rows(int t) const { return configuration.rows[t]; }
  int row_bytes(int t) const { return configuration.row_bytes[t]; }
};

thread_local Unit unit;
struct sigaction before;
std::atomic<long> configurations, releases;

enum Prefix { kNone, k66, kF3, kF2 };  // VEX.pp
enum Opcode { kConfigure = 0x49, kMove = 0x4B, kFloats = 0x5C, kBytes = 0x5E };

struct Instruction {
  int prefix, opcode, mode, reg, rm;
  int third;  // VEX.vvvv
  bool has_sib;
  int64_t address, stride;  // of the memory operand, if mode is not 3
  int length;
};

int64_t value_of(const ucontext_t* context, int number) {
  constexpr int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context->uc_mcontext.gregs[order[number]];
}

int64_t displacement(const uint8_t* at, int bytes) {
  if (bytes == 0) return 0;
  if (bytes == 1) return static_cast<int8_t>(*at);
  int32_t value;
  std::memcpy(&value, at, 4);
  return value;
}

// The memory operand that begins at code[5], the byte behind ModRM. A tile's stride is the scaled index; other
// instructions add it to the address.
void read_operand(const ucontext_t* context, const uint8_t* code, bool high_base, bool high_index,
                  Instruction& i) {
  const uint8_t* at = code + 5;
  int base = i.rm | (high_base ? 8 : 0), bytes = i.mode == 1 ? 1 : i.mode == 2 ? 4 : 0;
  bool no_base = i.mode == 0 && i.rm == 5;  // the address is relative to the next instruction
  i.has_sib = i.rm == 4;
  i.stride = 0;
  if (i.has_sib) {
    uint8_t sib = *at++;
    int index = (sib >> 3 & 7) | (high_index ? 8 : 0);
    if (index != 4) i.stride = value_of(context, index) * (1 << (sib >> 6));
    base = (sib & 7) | (high_base ? 8 : 0);
    no_base = i.mode == 0 && (sib & 7) == 5;
  }
  if (no_base) bytes = 4;
  i.length = static_cast<int>(at - code) + bytes;
  i.address = displacement(at, bytes);
  if (!no_base) i.address += value_of(context, base);
  else if (!i.has_sib) i.address += reinterpret_cast<int64_t>(code) + i.length;
}

// Whether there is an instruction of the map 0F38 with a VEX prefix of three bytes, W0 and 128 bits.
bool decode(const ucontext_t* context, const uint8_t* code, Instruction& i) {
  if (code[0] != 0xC4 || (code[1] & 0x1F) != 2 || (code[2] & 0x84) != 0) return false;
  bool high_reg = !(code[1] & 0x80), high_index = !(code[1] & 0x40), high_base = !(code[1] & 0x20);
  i = {};
  i.prefix = code[2] & 3;
  i.third = ~code[2] >> 3 & 15;
  i.opcode = code[3];
  i.mode = code[4] >> 6;
  i.reg = (code[4] >> 3 & 7) | (high_reg ? 8 : 0);
  i.rm = code[4] & 7;
  i.length = 5;
  if (i.mode != 3) read_operand(context, code, high_base, high_index, i);
  else if (high_base) i.rm |= 8;
  return true;
}

bool valid(const Configuration& c) {
  for (uint8_t byte : c.reserved)
    if (byte) return false;
  for (int t = 0; t < 16; ++t) {
    int most_rows = t < kTiles ? kMaxRows : 0, most_bytes = t < kTiles ? kRowBytes : 0;
    if (c.rows[t] > most_rows || c.row_bytes[t] > most_bytes || !c.rows[t] != !c.row_bytes[t]) return false;
  }
  return c.palette == 1 && c.start_row == 0;
}

bool configure(const Instruction& i) {
  Configuration loaded;
  std::memcpy(&loaded, reinterpret_cast<const void*>(i.address + i.stride), sizeof loaded);
  if (loaded.palette != 0 && !valid(loaded)) return false;
  std::memset(&unit, 0, sizeof unit);
  if (loaded.palette != 0) unit.configuration = loaded;
  ++configurations;
  return true;
}

bool zero(int t) {
  if (!unit.configured(t)) return false;
  std::memset(&unit.tiles[t], 0, sizeof(Tile));
  return true;
}

bool configure_or_zero(const Instruction& i) {
  if (i.third) return false;
  if (i.mode == 3 && i.prefix == kF2) return i.rm == 0 && zero(i.reg);
  if (i.mode == 3) {
    if (i.prefix != kNone || i.reg || i.rm) return false;
    std::memset(&unit, 0, sizeof unit);
    ++releases;
    return true;
  }
  if (i.reg || i.prefix > k66) return false;
  if (i.prefix == kNone) return configure(i);
  std::memcpy(reinterpret_cast<void*>(i.address + i.stride), &unit.configuration, sizeof(Configuration));
  return true;
}

bool move(const Instruction& i) {
  if (i.third || i.mode == 3 || !i.has_sib || i.prefix == kNone || !unit.configured(i.reg)) return false;
  Tile& tile = unit.tiles[i.reg];
  if (i.prefix != kF3) std::memset(&tile, 0, sizeof tile);
  for (int m = 0; m < unit.rows(i.reg); ++m) {
    void* memory = reinterpret_cast<void*>(i.address + m * i.stride);
    if (i.prefix == kF3) std::memcpy(memory, tile.row[m], unit.row_bytes(i.reg));
    else std::memcpy(tile.row[m], memory, unit.row_bytes(i.reg));
  }
  return true;
}

// One product and one sum for each half of a word, added up to the tile at the end; denormal numbers are
// zeros, of results too, and rounding is to nearest even: so MXCSR says while this runs.
__attribute__((target("avx512f"))) void add_floats(Tile& sums, const Tile& left, const Tile& right, int rows,
                                                   int depth, int lanes) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  for (int m = 0; m < rows; ++m) {
    __m512 low = _mm512_setzero_ps(), high = low;
    for (int k = 0; k < depth; ++k) {
      int word;
      std::memcpy(&word, &left.row[m][4 * k], 4);
      __m512i a = _mm512_set1_epi32(word), b = _mm512_load_si512(right.row[k]);
      low = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                            _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), low);
      high = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, upper)),
                             _mm512_castsi512_ps(_mm512_and_si512(b, upper)), high);
    }
    __m512 sum = _mm512_load_ps(sums.row[m]);
    auto exist = static_cast<__mmask16>((1 << lanes) - 1);
    _mm512_store_ps(sums.row[m], _mm512_maskz_add_ps(exist, sum, _mm512_add_ps(low, high)));
  }
}

void add_bytes(Tile& sums, const Tile& left, const Tile& right, int rows, int depth, int lanes,
               bool left_signed, bool right_signed) {
  auto number = [](uint8_t byte, bool is_signed) {
    return is_signed ? static_cast<int32_t>(static_cast<int8_t>(byte)) : static_cast<int32_t>(byte);
  };
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < lanes; ++n) {
      uint32_t sum;
      std::memcpy(&sum, &sums.row[m][4 * n], 4);
      for (int k = 0; k < depth; ++k)
        for (int b = 0; b < 4; ++b)
          sum += static_cast<uint32_t>(number(left.row[m][4 * k + b], left_signed) *
                                       number(right.row[k][4 * n + b], right_signed));
      std::memcpy(&sums.row[m][4 * n], &sum, 4);
    }
}

bool multiply(const Instruction& i) {
  int c = i.reg, a = i.rm, b = i.third;
  if (i.mode != 3 || c == a || c == b || a == b) return false;
  if (!unit.configured(c) || !unit.configured(a) || !unit.configured(b)) return false;
  if (unit.row_bytes(c) % 4 || unit.row_bytes(a) % 4 || unit.row_bytes(b) % 4) return false;
  int rows = unit.rows(c), depth = unit.row_bytes(a) / 4, lanes = unit.row_bytes(c) / 4;
  if (unit.rows(a) != rows || unit.rows(b) != depth || unit.row_bytes(b) != unit.row_bytes(c)) return false;
  if (i.opcode == kFloats) {
    if (i.prefix != kF3) return false;
    unsigned int control = _mm_getcsr();
    _mm_setcsr(0x9FC0);
    add_floats(unit.tiles[c], unit.tiles[a], unit.tiles[b], rows, depth, lanes);
    _mm_setcsr(control);
  } else {
    bool left_signed = i.prefix == kF2 || i.prefix == kF3, right_signed = i.prefix == kF2 || i.prefix == k66;
    add_bytes(unit.tiles[c], unit.tiles[a], unit.tiles[b], rows, depth, lanes, left_signed, right_signed);
  }
  return true;
}

bool execute(const Instruction& i) {
  if (i.opcode == kConfigure) return configure_or_zero(i);
  if (i.opcode == kMove) return move(i);
  return (i.opcode == kFloats || i.opcode == kBytes) && multiply(i);
}

void handle(int, siginfo_t*, void* raw) {
  auto* context = static_cast<ucontext_t*>(raw);
  auto& next = context->uc_mcontext.gregs[REG_RIP];
  Instruction instruction;
  if (decode(context, reinterpret_cast<const uint8_t*>(next), instruction) && execute(instruction)) {
    next += instruction.length;
    return;
  }
  sigaction(SIGILL, &before, nullptr);  // the instruction is met again, by the handler from before
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Nonzero: the system refused.
EXPORTED int amx_trap_install() {
  struct sigaction own = {};
  own.sa_sigaction = handle;
  own.sa_flags = SA_SIGINFO;
  sigemptyset(&own.sa_mask);
  return sigaction(SIGILL, &own, &before);
}

EXPORTED int amx_trap_remove() { return sigaction(SIGILL, &before, nullptr); }

// Instructions since the process began.
EXPORTED long amx_trap_configurations() { return configurations; }
EXPORTED long amx_trap_releases() { return releases; }
