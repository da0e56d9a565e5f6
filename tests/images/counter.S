# The smallest guest that proves something: a boot sector that counts its boots.
#
# Firmware loads it from the disk's first sector. It reads the second sector, adds one to the number
# there, writes it back, flushes nothing (firmware cannot), and prints "VMSEAL-COUNT <8 hex digits>" on
# the serial line. Then it answers what is typed there: p powers off (ACPI S5, as QEMU's q35 has it at
# port 0x604), z sleeps (S3, there too), c reports a panic (pvpanic), r counts again, anything else is
# echoed.
#
#   as --32 counter.S -o counter.o && ld -m elf_i386 -Ttext 0x7c00 --oformat binary counter.o -o counter.bin

    .code16
    .globl _start
_start:
    cli
    xorw    %ax, %ax
    movw    %ax, %ds
    movw    %ax, %es
    movw    %ax, %ss
    movw    $0x7c00, %sp
    sti
    cld
    movb    %dl, drive

count:
    movb    $0x42, %ah              # INT 13h extensions: read
    call    disk
    incl    0x7e00
    movw    $0x4300, %ax            # write, without verify
    call    disk
    cli                             # firmware's own last characters must not come in between
    movw    $text_count, %si
    call    print
    movl    0x7e00, %ebx
    movw    $8, %cx
digit:
    roll    $4, %ebx
    movb    %bl, %al
    andb    $0x0f, %al
    addb    $'0', %al
    cmpb    $'9', %al
    jbe     1f
    addb    $('a' - '9' - 1), %al
1:  call    put
    loop    digit
    movw    $text_end, %si
    call    print
    sti

wait:
    hlt                             # the timer wakes us 18 times a second
    movw    $0x3fd, %dx
    inb     %dx, %al
    testb   $1, %al
    jnz     line
    movb    $1, %ah                 # SeaBIOS may have the serial line as its keyboard
    int     $0x16
    jz      wait
    xorb    %ah, %ah
    int     $0x16
    jmp     typed
line:
    movw    $0x3f8, %dx
    inb     %dx, %al
typed:
    cmpb    $'r', %al
    je      count
    cmpb    $'p', %al
    je      off
    cmpb    $'z', %al
    je      sleep
    cmpb    $'c', %al
    je      panic
    call    put
    jmp     wait

off:
    movw    $0x604, %dx
    movw    $0x2000, %ax
    outw    %ax, %dx
    jmp     wait

sleep:
    movw    $0x604, %dx
    movw    $0x2400, %ax
    outw    %ax, %dx
    jmp     wait

panic:                              # the port of pvpanic: the guest has panicked
    movw    $0x505, %dx
    movb    $1, %al
    outb    %al, %dx
    jmp     wait

disk:                               # ah: what to do with the sector in `packet`
    movw    $packet, %si
    movw    $1, 2(%si)              # firmware leaves there how many it did: none after an error
    movb    drive, %dl
    int     $0x13
    jc      failed
    ret
failed:
    cli
    movw    $text_error, %si
    call    print
    sti
    jmp     wait

print:                              # si: text that ends with a zero
    lodsb
    testb   %al, %al
    jz      1f
    call    put
    jmp     print
1:  ret

put:                                # al: one character
    pushw   %dx
    movb    %al, %ah
    movw    $0x3fd, %dx
1:  inb     %dx, %al
    testb   $0x20, %al
    jz      1b
    movb    %ah, %al
    movw    $0x3f8, %dx
    outb    %al, %dx
    popw    %dx
    ret

drive:      .byte 0
text_count: .asciz "VMSEAL-COUNT "
text_end:   .asciz "\r\n"
text_error: .asciz "VMSEAL-DISK-ERROR\r\n"

    .balign 4
packet:                             # disk address packet of INT 13h extensions
    .byte   16, 0
    .word   1                       # sectors
    .word   0x7e00, 0               # offset, segment
    .quad   1                       # the second sector

    .org    510
    .word   0xaa55
